"""The console in a headless Chromium, in front of a gateway with mock engines and a fleet that is moved by hand.

Everything that a worker, a client or a model may have written is shown as text, whatever it is.
"""

from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tandem_engine.config import Role
from tandem_engine.messages.control import ServedAdapter
from tandem_engine.messages.outputs import CacheHits
from tandem_services.router.registry import WorkerState
from tandem_testing.browser import CHROMIUM, PATIENCE_MS, WatchedPage, chromium, watched_page
from tandem_testing.console_builders import ScriptedFleet, link, member, starting
from tandem_testing.gateway_builders import LiveGateway, live_gateway, priced_options_of, script
from tandem_testing.key_files import key_of, write_keys
from tandem_testing.mock_engine import MockBehavior, hash_tokens, scripted_tokens
from tandem_testing.tokenizer_builders import EOS
from tandem_testing.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("browser"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        CHROMIUM is None, reason="NOT CHECKED: no Chromium is installed, so the console page is not tested in a browser"
    ),
]

ATTACK = "<img src=x onerror=\"window.hacked='yes'\"><script>window.hacked='yes'</script><b>bold</b>"
MARKDOWN = """# Title

A **bold** *word* and `code`, [site](https://example.org/a) and [not](javascript:alert(1)).

- one
  - nested
- two

1. first
2. second

```python
if a < b:
    pass
```

| a | b |
|---|---|
| 1 | <b>2</b> |

The end."""


@dataclass(kw_only=True)
class Sight:
    """A gateway, its fleet, and a page that looks at both."""

    live: LiveGateway
    fleet: ScriptedFleet
    watched: WatchedPage

    async def open(self, view: str = "") -> None:
        await self.watched.page.goto(f"/console#{view}")

    async def shows(self, text: str) -> None:
        """Waits until the page shows `text`."""
        await self.watched.page.get_by_text(text).first.wait_for()

    async def text(self, selector: str = "main") -> str:
        return await self.watched.page.inner_text(selector)

    async def says(self, *wanted: str, selector: str = "main") -> None:
        """Waits until the text of `selector` has all of `wanted`; views are drawn again at every look at the fleet."""

        async def there() -> bool:
            text = await self.text(selector)
            return all(each in text for each in wanted)

        await until(there, PATIENCE_MS / 1000, f"{selector} says {wanted}")

    async def is_sound(self) -> None:
        """Nothing broke, nothing was fetched from elsewhere, and no text became markup."""
        assert self.watched.problems == []
        assert self.watched.foreign == []
        hostile = "[window.hacked ?? '', document.querySelectorAll('main img, main script, main b b').length]"
        assert await self.watched.page.evaluate(hostile) == ["", 0]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser():
    async with chromium() as browser:
        yield browser


@pytest.fixture
def see(browser, rack, tokenizer):
    @asynccontextmanager
    async def see(*members, behavior: MockBehavior | None = None, viewport=None, **config):
        answer = script(tokenizer, "All is well.", eos=EOS)
        rack.add("solo", behavior or MockBehavior(token=scripted_tokens(answer), eos=EOS))
        fleet = ScriptedFleet(members=list(members))
        async with (
            live_gateway(rack.context, tokenizer, rack.engines, seen=fleet, **config) as live,
            watched_page(browser, live.url, viewport=viewport or {"width": 1280, "height": 800}) as watched,
        ):
            yield Sight(live=live, fleet=fleet, watched=watched)

    return see


async def test_fleet_is_shown_with_its_states_caches_and_links(see):
    links = (link("decode-0"), link("decode-1", broken=True, problem="no route to host"))
    workers = [
        member("prefill-0", Role.PREFILL, links=links),
        member("decode-0", Role.DECODE, suspect=True),
        member("decode-1", Role.DECODE, state=WorkerState.PAUSED),
    ]
    async with see(*workers) as sight:
        await sight.open()
        await sight.shows("suspect")
        await sight.says("1\nof 3 ready", "paused", "35 %", "213", "1.20 GB/s", "broken: no route to host", "400 µs")
        sight.fleet.members[0] = member("prefill-0", Role.PREFILL, links=links, state=WorkerState.DRAINING)
        await sight.shows("draining")
        await sight.is_sound()


async def test_starting_workers_show_phases_before_others_serve(see):
    async with see() as sight:
        sight.fleet.starting = [
            starting(ATTACK),
            starting("d1", Role.DECODE, phase="kernels", done=7, total=16, unit=""),
        ]
        await sight.open()
        await sight.says(ATTACK, "weights 25 % of 4.00 GiB", "kernels 7 of 16", "12 s", selector=".starting")
        await sight.shows("It serves when the first workers of each role have started.")
        await sight.is_sound()
        sight.fleet.members = [member("p1", figures={"device": "cpu", "kernel_target": "x86-64-v3"})]
        await sight.says("p1", "CPU kernels\nx86-64-v3", "Devices\ncpu")
        sight.fleet.starting = []
        await sight.watched.page.wait_for_selector(".starting", state="hidden", timeout=PATIENCE_MS)
        await sight.is_sound()


async def test_fleet_of_a_gateway_without_starting_workers_is_shown(see):
    async def earlier_release(route):
        answer = await route.fetch()
        await route.fulfill(response=answer, json={k: v for k, v in (await answer.json()).items() if k != "starting"})

    async with see() as sight:
        await sight.watched.page.route("**/console/data/fleet", earlier_release)
        await sight.open()
        await sight.shows("No workers")
        sight.fleet.members = [member("p1")]
        await sight.says("p1", "1\nof 1 ready")
        await sight.is_sound()


async def test_console_shows_vanished_as_lost_and_drained_as_left(see):
    async with see(member("w1"), member("w2"), member("w3", state=WorkerState.DRAINING)) as sight:
        await sight.open()
        await sight.shows("draining")
        del sight.fleet.members[1:]
        await sight.watched.page.wait_for_selector("tbody:has([data-state=lost]):has([data-state=left])")
        await sight.says("1\nof 1 ready")


async def test_empty_fleet_and_a_lost_redis_are_explained(see):
    async with see() as sight:
        await sight.open()
        await sight.shows("No workers")
        sight.fleet.members.append(member("w1"))
        await sight.shows("1000")
        sight.fleet.age_s = 65.0
        await sight.shows("Redis has not answered for 65")
        sight.live.health.drain()
        await sight.shows("This gateway is draining")


async def test_unreachable_gateway_is_shown_and_polled_again(see):
    async with see(member("w1")) as sight:
        await sight.open()
        await sight.shows("live")
        await sight.watched.page.route("**/console/data/**", lambda route: route.abort())
        await sight.shows("The gateway does not answer. Retrying in")
        await sight.says("w1")
        await sight.watched.page.unroute("**/console/data/**")
        await sight.shows("live")


async def test_worker_texts_are_shown_as_text(see):
    hostile = member(
        "w1", links=(link("w2", problem=ATTACK),), model=ATTACK, incarnation=f"{ATTACK}@1", worker_id=ATTACK
    )
    async with see(hostile, member("w2")) as sight:
        await sight.open()
        await sight.shows("onerror")
        await sight.is_sound()


async def test_model_output_is_text_with_a_timeline_link(see, tokenizer):
    tokens = script(tokenizer, ATTACK, eos=EOS)
    async with see(member("w1"), behavior=MockBehavior(token=scripted_tokens(tokens), eos=EOS)) as sight:
        page = sight.watched.page
        await sight.open("playground")
        await page.fill("#prompt", ATTACK)
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".chat-message.model a")
        assert await sight.text(".chat-message.model > .text") == ATTACK
        assert await sight.text(".chat-message.user .text") == ATTACK
        await sight.says("first token", "tokens/s", f"{len(tokens)} tokens", selector=".chat-message.model .facts")
        await page.click(".chat-message.model a")
        await page.wait_for_selector(".lane")
        await sight.says("Prefill", "Decode", "finished by stop", "solo@1", "Score")
        await page.click("nav a[href='#requests']")
        await page.wait_for_selector("tbody tr:has-text('chat')")
        await sight.is_sound()


async def test_playground_renders_markdown_as_elements(see, tokenizer):
    behavior = MockBehavior(token=scripted_tokens(script(tokenizer, MARKDOWN, eos=EOS)), eos=EOS)
    async with see(member("w1"), behavior=behavior, viewport={"width": 360, "height": 740}) as sight:
        page = sight.watched.page
        await sight.open("playground")
        await page.fill("#prompt", "go")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".chat-message.model a[href^='#request']")
        seen = """Array.from(document.querySelectorAll(".markdown > *"))
            .map((each) => [each.tagName + (each.className && "." + each.className), each.innerText.trim()])
            .map(([kind, text]) => [kind, text.replace(/\\n+/g, "\\n")])"""
        assert await page.evaluate(seen) == [
            ["H4", "Title"],
            ["P", "A bold word and code, site and [not](javascript:alert(1))."],
            ["UL", "one\nnested\ntwo"],
            ["OL", "first\nsecond"],
            ["DIV.code", "python\nCopy\nif a < b:\n    pass"],
            ["DIV.scroll", "a\tb\n1\t<b>2</b>"],
            ["P", "The end."],
        ]
        links = "Array.from(document.querySelectorAll('.markdown a')).map((each) => [each.href, each.rel])"
        assert await page.evaluate(links) == [["https://example.org/a", "noopener noreferrer"]]
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        await page.click(".code button")
        await page.wait_for_selector(".code button:is(:text('Copied'), :text('Selected'))")
        await sight.is_sound()


async def test_growing_markdown_rebuilds_the_last_block_alone(see):
    async with see(member("w1")) as sight:
        await sight.open()
        grown = """async (text) => {
            const { MarkdownView } = await import("/console/assets/markdown.js");
            const [whole, growing] = [new MarkdownView(), new MarkdownView()];
            whole.update(text);
            let kept = true;
            for (let end = 1; end <= text.length; end += 1) {
                const before = Array.from(growing.element.children).slice(0, -1);
                growing.update(text.slice(0, end));
                kept &&= before.every((each, index) => growing.element.children[index] === each);
            }
            return [kept, whole.element.innerHTML === growing.element.innerHTML];
        }"""
        assert await sight.watched.page.evaluate(grown, MARKDOWN) == [True, True]
        await sight.is_sound()


async def test_api_view_sends_requests_and_shows_answers_as_text(see, tokenizer):
    tokens = script(tokenizer, ATTACK, eos=EOS)
    answering = MockBehavior(token=scripted_tokens(tokens), eos=EOS)
    async with see(member("w1"), behavior=answering, viewport={"width": 390, "height": 780}) as sight:
        page = sight.watched.page
        await page.goto("/docs")
        await page.fill("#api-filter", "post chat/completions")
        await page.click("summary:has-text('/v1/chat/completions'):visible")
        form = page.locator(".try").first
        await sight.says("curl", '"model": "mock"', "application/json", selector=".try pre")
        await form.locator("button:has-text('Send')").click()
        await page.wait_for_selector(".answer .state[data-state=good]")
        await sight.says("chat.completion", "onerror", selector=".answer pre")
        body = '{"messages": [{"role": "user", "content": "x"}], "stream": true}'
        await form.locator("textarea").fill(body)
        await form.locator("button:has-text('Send')").click()
        await sight.says("chat.completion.chunk", "data: [DONE]", selector=".answer pre")
        await form.locator("textarea").fill("{")
        await form.locator("button:has-text('Send')").click()
        await page.wait_for_selector(".answer .state[data-state=failed]")
        await sight.says("400", selector=".answer")
        await page.click("summary:text-is('Body')")
        await page.click("summary:text-is('ChatMessage')")
        await sight.says("messages required", "temperature", "number, 0 to 2", "role required")
        assert await page.evaluate("document.documentElement.scrollWidth") == 390
        await sight.is_sound()


async def test_every_operation_of_the_api_view_opens(see):
    async with see(member("w1")) as sight:
        page = sight.watched.page
        await sight.open("api")
        await page.wait_for_selector(".operation")
        document = (await sight.live.http.get("/openapi.json")).json()
        assert await page.locator(".operation").count() == sum(map(len, document["paths"].values()))
        # Schemas open level by level, and refer to each other: five levels are all that these have.
        for _ in range(5):
            await page.evaluate("for (const each of document.querySelectorAll('details:not([open])')) each.open = true")
        await page.wait_for_selector("details[open] .inside .inside td")
        assert await page.locator("details[open] > .inside:empty").count() == 0
        await sight.is_sound()


async def test_refused_requests_are_listed_with_code_and_field(see):
    async with see(member("w1")) as sight:
        await sight.open("errors")
        await sight.shows("No refused requests")
        await sight.live.http.post("/v1/chat/completions", json={"messages": ATTACK, "model": "mock"})
        await sight.says("400", "chat", "BadRequestError: messages")
        assert "onerror" not in await sight.text()
        await sight.is_sound()


async def test_about_names_adapters_and_the_workers_that_have_them(see):
    served = {name: ServedAdapter(name=name, digest="0a" * 16, rank=4, root="") for name in ("sql", "<b>")}
    async with see(member("w1", adapters=served), member("w2", adapters={"sql": served["sql"]})) as sight:
        await sight.open()
        await sight.says("Adapters", "<b> (1 of 2 workers), sql", selector=".about")
        await sight.is_sound()


async def test_console_curves_are_drawn_again_after_a_reload(see):
    async with see(member("w1")) as sight:
        await sight.live.http.get("/console/data/fleet")
        await sight.open()
        await sight.watched.page.wait_for_selector(".tile .spark .line[d^='M']", state="attached")
        document = (await sight.live.http.get("/console/data/history")).json()
        recorded = len(document["samples"])
        await sight.watched.page.reload()
        await sight.shows("live")
        path = await sight.watched.page.get_attribute(".tile .spark .line >> nth=0", "d")
        assert path is not None
        assert path.count("L") + 1 >= recorded >= 1
        await sight.says("API keys", "not required", "Tandem", selector=".about")
        await sight.is_sound()


async def test_timeline_shows_every_attempt_and_what_was_resumed(see, rack, tokenizer):
    answer = scripted_tokens(script(tokenizer, "Not all is well here.", eos=EOS))
    rack.add("frail", MockBehavior(token=answer, eos=EOS, die_after=3))
    async with see(member("w1"), behavior=MockBehavior(token=answer, eos=EOS)) as sight:
        done = (await sight.live.chat()).json()
        await sight.open(f"request/{done['id']}")
        await sight.shows("Attempt 2")
        await sight.says("after 3 tokens that the client already had", "frail@1", "solo@1", "finished")
        assert await sight.watched.page.locator(".span.failed").count() == 1
        await sight.is_sound()


async def test_timeline_shows_what_workers_were_chosen_from(see):
    async with see(member("w1")) as sight:
        sight.live.chooser.priced = priced_options_of(None, "solo@1", others=2, more=3)
        done = (await sight.live.chat()).json()
        await sight.open(f"request/{done['id']}")
        await sight.shows("Chosen from")
        rows = await sight.watched.page.locator(".candidates tbody tr").all_inner_texts()
        assert [row.split()[0] for row in rows] == ["solo@1", "other-0@1", "other-1@1"]
        assert "64 tokens cached (48 in host memory), 128 with those of p@1, compute the prompt 1 s" in rows[1]
        assert "3 others, dearer than these" in await sight.text(".candidates")
        await sight.is_sound()


async def test_timeline_shows_the_scheduling_delay(see):
    delayed = MockBehavior(token=hash_tokens(3, 250), eos=EOS, queue_s=0.5, delay_s=0.25)
    async with see(member("w1"), behavior=delayed) as sight:
        done = (await sight.live.chat(max_tokens=1)).json()
        record = (await sight.live.http.get(f"/v1/requests/{done['id']}/explain")).json()
        assert (record["choices"][0]["queue_s"], record["choices"][0]["delay_s"]) == (0.5, 0.25)
        await sight.open(f"request/{done['id']}")
        await sight.says("Scheduling delay", "250 ms")
        await sight.is_sound()


async def test_timeline_shows_where_cached_tokens_were(see):
    found = MockBehavior(token=hash_tokens(3, 250), eos=EOS, cached_tokens=64, cache_hits=CacheHits(host=16, fetched=8))
    async with see(member("w1"), behavior=found) as sight:
        done = (await sight.live.chat(max_tokens=1)).json()
        await sight.open(f"request/{done['id']}")
        await sight.says("64 found (16 in host memory, 8 fetched)")
        await sight.is_sound()


async def test_answer_can_be_stopped(see, tokenizer):
    endless = MockBehavior(token=lambda *_: tokenizer.encode("a", add_special_tokens=False)[0], step_s=0.5)
    async with see(member("w1"), behavior=endless) as sight:
        page = sight.watched.page
        await sight.open("playground")
        await page.fill("#max-tokens", "400")
        await page.fill("#prompt", "go on")
        await page.click("button:has-text('Send')")
        await page.wait_for_selector(".chat-message.model > .text:has-text('aa')")
        await page.click("button:has-text('Stop')")
        await page.wait_for_selector(".facts .state:has-text('stopped')")
        await page.wait_for_selector("button:has-text('Send')")
        await sight.is_sound()


async def test_refused_message_shows_why_and_is_taken_back(see):
    async with see(member("w1")) as sight:
        page = sight.watched.page
        await sight.open("playground")
        await page.fill("#max-tokens", "100000")
        await page.fill("#prompt", "much")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".facts .state[data-state=failed]")
        await sight.says("maximum context length is 512", selector=".chat-message.model .facts")
        await sight.is_sound()


async def test_key_is_asked_for_and_opens_what_it_may(see, tmp_path):
    keys = write_keys(tmp_path, ann={}, root={"admin": True})
    async with see(member("w1"), api_keys=keys) as sight:
        page = sight.watched.page

        async def give(key: str) -> None:
            await page.fill("#key-input", key)
            await page.keyboard.press("Enter")

        await sight.open()
        await page.wait_for_selector("dialog[open]")
        await give("wrong")
        await sight.shows("The gateway rejected this key.")
        await give(key_of("ann"))
        await sight.shows("The fleet is for administrators")
        await page.click("nav a[href='#playground']")
        await page.wait_for_selector("#model option[value=mock]", state="attached")
        await page.click("#key-button")
        await give(key_of("root"))
        await page.click("nav a[href='#fleet']")
        await page.wait_for_selector("tbody tr")
        assert await page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]
        await page.click("#key-button")
        await page.click("#key-forget")
        assert await page.evaluate("sessionStorage.length") == 0
        await sight.is_sound()


async def test_policy_stops_what_escaping_would_have_missed(see):
    async with see(member("w1")) as sight:
        page = sight.watched.page
        await sight.open()
        await sight.shows("live")
        tries = """() => ["innerHTML", "outerHTML"].map((name) => {
            try { document.querySelector("main")[name] = "<img src=x>"; return "done"; }
            catch (error) { return error.name; }
        })"""
        assert await page.evaluate(tries) == ["TypeError", "TypeError"]


@pytest.mark.parametrize("width", [320, 390, 768])
@pytest.mark.parametrize("view", ["fleet", "requests", "errors", "playground", "request/none", "api"])
async def test_narrow_screens_show_every_view_without_scrolling(see, view, width):
    workers = [
        member(f"a-worker-with-a-long-name-{i}", links=(link("w2", problem="a long story " * 9),)) for i in range(3)
    ]
    async with see(*workers, viewport={"width": width, "height": 740}) as sight:
        page = sight.watched.page
        sight.fleet.starting = [starting("x" * 200, phase="y" * 200), starting("w", role="z" * 200)]
        await sight.live.http.post("/v1/chat/completions", json={"messages": [], "a_field_of_a_long_name" * 4: 1})
        await sight.open(view)
        await page.wait_for_selector("main h1")
        await sight.shows("live")
        sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        assert await page.evaluate(sizes) == [width, width]
        unnamed = """Array.from(document.querySelectorAll("button, a, input, select, textarea"))
            .filter((each) => each.checkVisibility())
            .filter((each) => !(each.innerText || each.ariaLabel || each.labels?.length)).length"""
        assert await page.evaluate(unnamed) == 0
        await sight.is_sound()


@pytest.mark.parametrize("width", [320, 390, 768])
async def test_served_request_page_fits_narrow_screens(see, tmp_path, width):
    found = MockBehavior(token=hash_tokens(3, 250), eos=EOS, cached_tokens=64, cache_hits=CacheHits(host=16, fetched=8))
    async with see(member("w1"), behavior=found, viewport={"width": width, "height": 844}) as sight:
        page = sight.watched.page
        sight.live.chooser.priced = priced_options_of(None, "a-worker-with-a-long-name-0@1", others=4, more=3)
        done = (await sight.live.chat(max_tokens=3)).json()
        await sight.open(f"request/{done['id']}")
        await sight.shows("Chosen from")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        wide = """(width) => Array.from(document.querySelectorAll("main *"))
            .filter((each) => !each.closest(".scroll") && each.getBoundingClientRect().right > width + 1)
            .map((each) => each.className)"""
        assert await page.evaluate(wide, width) == []
        await sight.is_sound()


async def test_key_dialog_states_whether_a_key_is_needed(see, tmp_path):
    async with see(member("w1")) as sight:
        await sight.open()
        await sight.shows("live")
        await sight.watched.page.click("#key-button")
        await sight.says("authentication is disabled", selector="#key-why")
        await sight.is_sound()


async def test_key_dialog_opens_where_a_key_is_needed(see, tmp_path):
    async with see(member("w1"), api_keys=write_keys(tmp_path, ann={})) as sight:
        await sight.open()
        await sight.watched.page.wait_for_selector("dialog[open]")
        await sight.says("This gateway requires a key.", selector="#key-why")
        await sight.is_sound()


@pytest.mark.parametrize("width", [1440, 768, 390])
async def test_refused_requests_are_in_the_list(see, width):
    async with see(member("w1"), viewport={"width": width, "height": 844}) as sight:
        page = sight.watched.page
        assert (await sight.live.chat(temperature=ATTACK)).status_code == 400
        await sight.live.chat(max_tokens=1)
        await sight.open("requests")
        await sight.shows("BadRequestError: temperature")
        assert await page.locator("tbody .state[data-state=failed]").all_inner_texts() == ["400"]
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await page.click("tbody tr:has-text('400') a")
        await sight.says("BadRequestError: temperature", "400")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await sight.is_sound()
