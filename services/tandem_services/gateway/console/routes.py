"""The console: a page of static files, and the JSON that it polls. Served on the port that serves /metrics.

    /                              to the page, for browsers; for programs a name, version and links, without a key
    /docs                          to the page's description of the API, without a key
    /console                       the page                        without a key: contains no data of the deployment
    /console/assets/{name}         its scripts and styles          without a key
    /console/data/fleet            workers, links, this gateway    administrators
    /console/data/history          its last hour                   administrators
    /console/data/errors           refused requests                administrators
    /console/data/requests         the latest requests             administrators
    /console/data/requests/{id}    one request, as in explain      administrators

The files are read once. Their headers allow no script, style or connection from or to another host, no inline script,
no frame around the page, and no text that becomes markup (Trusted Types, in browsers that support them).

All viewers share the data of one second, so the cost of polling is bounded by the number of connections.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tandem_engine.base.clock import Clock
from tandem_engine.base.logs import quoted
from tandem_services.common.errors import not_found
from tandem_services.gateway.console.fleet_history import FleetHistory
from tandem_services.gateway.http.authentication import Access
from tandem_services.gateway.http.monitoring_routes import VERSION
from tandem_services.gateway.http.sse import encode_json
from tandem_services.gateway.observe.explain import RequestJournal

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

SAME_ORIGIN = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}
"""Of everything that belongs to the console."""

PAGE_HEADERS = SAME_ORIGIN | {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "x-frame-options": "DENY",
    # Revalidated each time, and answered 304: a new release of the gateway shows a new page at once.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """One file."""

    name: str
    body: bytes
    headers: Mapping[str, str]

    @property
    def etag(self) -> str:
        return self.headers["etag"]


def read_assets() -> Iterator[Asset]:
    """All files of `static/`."""
    for file in (files("tandem_services.gateway.console") / "static").iterdir():
        kind = MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if kind is None:
            continue
        body = file.read_bytes()
        etag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
        yield Asset(name=file.name, body=body, headers=PAGE_HEADERS | {"content-type": kind, "etag": etag})


KEPT_S = 1.0
"""The router's view of the fleet is not renewed more often (`router.keys.HEARTBEAT_S`)."""


@dataclass(kw_only=True, slots=True)
class SharedDocument:
    """Without viewers it costs nothing; each further viewer costs only the sending of existing bytes."""

    build: Callable[[], object]
    """Called on the event loop: about a millisecond for 64 workers (benchmarks/console_cost.py)."""
    clock: Clock
    builds: int = 0
    _bytes: bytes = b""
    _built_at: float = float("-inf")

    def current(self) -> bytes:
        """No older than `KEPT_S`."""
        now = self.clock.now()
        if now - self._built_at >= KEPT_S:
            self._bytes, self._built_at = encode_json(self.build()), now
            self.builds += 1
        return self._bytes


ROOT = "/"
PAGE = "/console"
DOCS = "/docs"
INDEX = "index.html"
ASSETS = f"{PAGE}/assets/"
DATA = f"{PAGE}/data/"
DATA_HEADERS = SAME_ORIGIN | {"cache-control": "no-store"}
READ = ["GET", "HEAD"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Console:
    """What the routes answer with. One per gateway."""

    fleet: SharedDocument
    requests: SharedDocument
    errors: SharedDocument
    history: FleetHistory
    journal: RequestJournal
    assets: dict[str, Asset] = field(default_factory=lambda: {asset.name: asset for asset in read_assets()})

    def admit(self, access: Access | None) -> Access | None:
        """`access`, which lets the page in and keeps its data for administrators."""
        if access is None:
            return None
        page = {ROOT, DOCS, PAGE, f"{PAGE}/", *(f"{ASSETS}{name}" for name in self.assets)}
        return replace(access, open_paths=access.open_paths | page, admin_folders=(DATA,))

    def routes(self) -> list[Route]:
        answers = {
            ROOT: self._root,
            DOCS: self._docs,
            PAGE: self._page,
            f"{PAGE}/": self._redirect,
            ASSETS + "{name}": self._asset,
            f"{DATA}fleet": self._fleet,
            f"{DATA}history": self._history,
            f"{DATA}errors": self._errors,
            f"{DATA}requests": self._requests,
            DATA + "requests/{request_id}": self._request,
        }
        return [Route(path, answer, methods=READ) for path, answer in answers.items()]

    async def _root(self, request: Request) -> Response:
        """Links are relative, as in `_redirect`."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(PAGE.removeprefix("/"), 307, headers=SAME_ORIGIN | {"vary": "accept"})
        links = {"console": PAGE, "docs": DOCS, "openapi": "/openapi.json", "models": "/v1/models"}
        relative = {name: path.removeprefix("/") for name, path in links.items()}
        body = encode_json({"name": "Tandem", "version": VERSION, "links": relative})
        return Response(body, headers=DATA_HEADERS | {"vary": "accept"}, media_type="application/json")

    async def _docs(self, _: Request) -> Response:
        """Relative, as in `_redirect`."""
        return RedirectResponse(f"{PAGE.removeprefix('/')}#api", 307, headers=SAME_ORIGIN)

    async def _page(self, request: Request) -> Response:
        return _send(self.assets[INDEX], request)

    async def _redirect(self, _: Request) -> Response:
        """Relative, so that it holds behind a proxy that serves the gateway under a prefix."""
        return RedirectResponse(f"..{PAGE}", 308, headers=SAME_ORIGIN)

    async def _asset(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        asset = self.assets.get(name)
        if asset is None:
            raise not_found(f"The console has no file '{quoted(name)}'.", "name")
        return _send(asset, request)

    async def _fleet(self, _: Request) -> Response:
        self.history.viewed()
        return _data(self.fleet.current())

    async def _history(self, _: Request) -> Response:
        self.history.viewed()
        return _data(encode_json(self.history.document()))

    async def _errors(self, _: Request) -> Response:
        return _data(self.errors.current())

    async def _requests(self, _: Request) -> Response:
        return _data(self.requests.current())

    async def _request(self, request: Request) -> Response:
        request_id: str = request.path_params["request_id"]
        record = self.journal.find_of_any_caller(request_id)
        if record is None:
            raise not_found(f"No recent request has the id '{quoted(request_id)}'.", "request_id")
        return _data(encode_json(record))


def _send(asset: Asset, request: Request) -> Response:
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=dict(asset.headers))
    return Response(asset.body, headers=dict(asset.headers))


def _data(body: bytes) -> Response:
    return Response(body, headers=DATA_HEADERS, media_type="application/json")
