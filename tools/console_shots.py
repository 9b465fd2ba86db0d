"""Takes the pictures of docs/console/ from a real fleet: `make console-shots`.

With ARGS="--look DIR" it also takes every view at three widths, light and dark, to be looked at before a release.

Two prefill and two decode workers of the bundled model, chats that share beginnings, a worker that is killed, and a
headless Chromium (`apt-get install chromium`) that looks at it all. Takes a minute or two.
"""

import argparse
import asyncio
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from playwright.async_api import Browser, Page

from tandem_testing.browser import CHROMIUM, chromium, watched_page
from tandem_testing.system import System

PNGQUANT = shutil.which("pngquant")
"""Makes pictures of a page a third as large (`apt-get install pngquant`); without it they stay large."""
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 780}
LOOKED_AT = ({"width": 1440, "height": 900}, {"width": 768, "height": 1024}, PHONE)
FLEET = "--prefill 2 --decode 2 --local-prefill-tokens 64 --num-pages 480".split()
START_S = 300.0
CLIENTS = 6
WARM_UP_S = 45
"""Long enough for curves that show something, and for links to be measured."""
STARTED_S = 1.5
"""From the first report of a worker that starts to one that shows more than imports."""
SYSTEM = "You are a storyteller and know every animal of the forest by name. You never tell the same story twice. "
TOPICS = ("a fox by the river", "an owl and a lantern", "two hares and the first snow", "a badger that counts stars")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """One picture."""

    name: str
    view: str
    scheme: str = "light"
    phone: bool = False
    viewport: dict[str, int] | None = None
    """Instead of the usual one."""
    prepare: Callable[[Page], Awaitable[None]] | None = None
    whole: bool = True
    """The page to its end, not just what a window shows."""


async def wait_for_rows(page: Page) -> None:
    await page.wait_for_selector("tbody tr")


async def wait_for_lanes(page: Page) -> None:
    await page.wait_for_selector(".lane")


async def chat(page: Page) -> None:
    await page.fill("#max-tokens", "90")
    await page.fill("#prompt", "Tell me a story about a fox who lives near a river.")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".chat-message.model a")


async def traffic(url: str) -> None:
    """Chats until cancelled; turns of a conversation, so that beginnings are cached."""

    async def client(number: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
            for turn in itertools.count():
                messages = [{"role": "system", "content": SYSTEM * (1 + number % 3)}]
                for before in range(turn % 4 + 1):
                    messages.append(
                        {"role": "user", "content": f"Tell me about {TOPICS[(number + before) % len(TOPICS)]}."}
                    )
                    messages.append({"role": "assistant", "content": "Once upon a time."})
                body = {"model": "tandem-mini", "messages": messages[:-1], "max_tokens": 24 + 8 * number}
                # A worker that is killed may cost an answer; the picture is of the fleet.
                with suppress(httpx.HTTPError):
                    await http.post("/v1/chat/completions", json=body)
                await asyncio.sleep(0.3 * (number + 1))

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


@asynccontextmanager
async def looking(browser: Browser, url: str, shot: Shot) -> AsyncIterator[Page]:
    """A page that is open at the view of `shot`. An error of the page ends all shots."""
    viewport = shot.viewport or (PHONE if shot.phone else WIDE)
    scale = 1.5 if shot.phone else 1
    async with watched_page(
        browser, url, viewport=viewport, color_scheme=shot.scheme, device_scale_factor=scale, timezone_id="UTC"
    ) as watched:
        await watched.page.goto(f"/console#{shot.view}")
        yield watched.page
        if watched.problems or watched.foreign:
            raise SystemExit(f"{shot.name}: errors of the page: {watched.problems + watched.foreign}")


async def take(page: Page, shot: Shot, folder: Path) -> None:
    if shot.prepare is not None:
        await shot.prepare(page)
    # The mouse rests where nothing is, and what has just arrived is drawn.
    await page.mouse.move(0, 0)
    await page.wait_for_timeout(300)
    path = folder / f"{shot.name}.png"
    await page.screenshot(path=path, full_page=shot.whole, animations="disabled")


async def longest_request(url: str) -> str:
    """One that moved KV, if there is any, with the longest output."""
    async with httpx.AsyncClient(base_url=url) as http:
        rows = (await http.get("/console/data/requests")).json()
    ended = [row for row in rows if row["status"] == 200]
    return max(ended, key=lambda row: (row["prefill"] is not None, row["output_tokens"]))["request_id"]


async def send_refused(url: str) -> None:
    """Requests that the view of errors shows."""
    fields = ({"temperature": 9}, {"max_tokens": -1}, {"logit_bias": {"x": 1}}, {"model": "another"})
    async with httpx.AsyncClient(base_url=url) as http:
        for wrong in fields:
            await http.post("/v1/completions", json={"model": "tandem-mini", "prompt": "A fox", **wrong})


async def look(browser: Browser, url: str, request: str, folder: Path) -> None:
    """Every view at every width, light and dark."""
    views = {
        "fleet": wait_for_rows,
        "requests": wait_for_rows,
        f"request/{request}": wait_for_lanes,
        "errors": None,
        "playground": None,
        "api": None,
    }
    for viewport, scheme, (view, prepare) in itertools.product(LOOKED_AT, ("light", "dark"), views.items()):
        name = f"{view.partition('/')[0]}-{viewport['width']}-{scheme}"
        shot = Shot(name=name, view=view, scheme=scheme, viewport=viewport, prepare=prepare)
        async with looking(browser, url, shot) as page:
            await take(page, shot, folder)
            wider = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            if wider:
                print(f"{name}: the page is {wider} px wider than the window", file=sys.stderr)


async def take_all(system: System, folder: Path, looked_at: Path | None) -> None:
    async with chromium() as browser:
        sending = asyncio.create_task(traffic(system.url))
        light, dark = (
            Shot(name=f"fleet-{scheme}", view="fleet", scheme=scheme, prepare=wait_for_rows)
            for scheme in ("light", "dark")
        )
        async with looking(browser, system.url, light) as day, looking(browser, system.url, dark) as night:
            await asyncio.sleep(WARM_UP_S)
            await take(day, light, folder)
            await take(night, dark, folder)
            request = await longest_request(system.url)
            for shot in (
                Shot(name="timeline", view=f"request/{request}", prepare=wait_for_lanes),
                Shot(name="requests", view="requests", scheme="dark", prepare=wait_for_rows, whole=False),
                Shot(name="playground", view="playground", prepare=chat, whole=False),
                Shot(
                    name="phone",
                    view=f"request/{request}",
                    scheme="dark",
                    phone=True,
                    prepare=wait_for_lanes,
                    whole=False,
                ),
            ):
                async with looking(browser, system.url, shot) as page:
                    await take(page, shot, folder)
            if looked_at is not None:
                await send_refused(system.url)
                await look(browser, system.url, request, looked_at)
            with system.no_restarts():
                system.kill(system.service_pid("decode-1"))
                await day.wait_for_selector("[data-state=lost]", timeout=60_000)
                # By then its peers have noticed, and what ran on it runs elsewhere.
                await asyncio.sleep(5)
                await take(day, Shot(name="worker-lost", view="fleet", whole=False), folder)
            await day.wait_for_selector(".starting li", timeout=60_000)
            await asyncio.sleep(STARTED_S)
            await take(day, Shot(name="starting", view="fleet", whole=False), folder)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def compress(folder: Path) -> None:
    for path in sorted(folder.glob("*.png")):
        if PNGQUANT is not None:
            subprocess.run([PNGQUANT, "--force", "--ext", ".png", "--speed", "1", "96", str(path)], check=True)
        print(f"{path}  {path.stat().st_size // 1024} KiB")


def main() -> int:
    parser = argparse.ArgumentParser(description="Take the pictures of docs/console/ from a real fleet.")
    parser.add_argument("--out", type=Path, default=Path("docs/console"), metavar="DIR", help="(default docs/console)")
    parser.add_argument("--look", type=Path, metavar="DIR", help="every view at three widths, light and dark")
    args = parser.parse_args()
    if CHROMIUM is None:
        print("no Chromium is installed: apt-get install chromium", file=sys.stderr)
        return 1
    for folder in filter(None, (args.out, args.look)):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as run_dir:
        system = System.launch(Path(run_dir), *FLEET)
        try:
            system.wait_until_up(START_S)
            asyncio.run(take_all(system, args.out, args.look))
        finally:
            system.close()
    compress(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
