"""The console's routes, on the port where /metrics is.

/console                       the page                         without a key: it holds nothing of this deployment
/console/assets/{name}         its scripts and styles           without a key
/console/data/fleet            workers, links, this gateway     administrators
/console/data/requests         the latest requests              administrators
/console/data/requests/{id}    one of them, as explain has it   administrators

The page asks for a key where one is needed, and polls. A poll sends bytes that all viewers of that second share, so
their number is bounded by connections alone.
"""

from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tandem_engine.logs import quoted
from tandem_services.common.errors import not_found
from tandem_services.gateway.access.authentication import Access
from tandem_services.gateway.answer_format import encode_json
from tandem_services.gateway.console.assets import SAME_ORIGIN, Asset, read_assets
from tandem_services.gateway.console.shared_document import SharedDocument
from tandem_services.gateway.request_journal import RequestJournal

PAGE = "/console"
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
    journal: RequestJournal
    assets: dict[str, Asset] = field(default_factory=lambda: {asset.name: asset for asset in read_assets()})

    def admit(self, access: Access | None) -> Access | None:
        """`access`, which lets the page in and keeps its data for administrators."""
        if access is None:
            return None
        page = {PAGE, f"{PAGE}/", *(f"{ASSETS}{name}" for name in self.assets)}
        return replace(access, open_paths=access.open_paths | page, admin_folders=(DATA,))

    def routes(self) -> list[Route]:
        answers = {
            PAGE: self._page,
            f"{PAGE}/": self._redirect,
            ASSETS + "{name}": self._asset,
            f"{DATA}fleet": self._fleet,
            f"{DATA}requests": self._requests,
            DATA + "requests/{request_id}": self._request,
        }
        return [Route(path, answer, methods=READ) for path, answer in answers.items()]

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
        return _data(self.fleet.current())

    async def _requests(self, _: Request) -> Response:
        return _data(self.requests.current())

    async def _request(self, request: Request) -> Response:
        request_id: str = request.path_params["request_id"]
        record = self.journal.find_anybodys(request_id)
        if record is None:
            raise not_found(f"No recent request has the id '{quoted(request_id)}'.", "request_id")
        return _data(encode_json(record))


def _send(asset: Asset, request: Request) -> Response:
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=dict(asset.headers))
    return Response(asset.body, headers=dict(asset.headers))


def _data(body: bytes) -> Response:
    return Response(body, headers=DATA_HEADERS, media_type="application/json")
