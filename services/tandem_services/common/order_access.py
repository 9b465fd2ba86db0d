"""Who may give orders to a worker or a gateway: whoever runs it, and no page in somebody's browser.

An order needs, in this sequence:

    a Host that the port answers (`allowed_hosts`), and no Origin but the port's own    else 403
    of a POST: Content-Type application/json, which a page cannot send elsewhere
    without asking                                                                      else 415
    the token, from this machine too (`order_token`)                                    else 401
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.order_token import brings_token

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class OrderRefusal:
    """Why an order is not taken."""

    status: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderAccess:
    """Of one port."""

    token: str
    hosts: AllowedHosts
    needs_token: bool = True
    """False where --allow-remote-orders leaves it to the network."""

    def refusal(self, request: HTTPConnection) -> OrderRefusal | None:
        """None where the order may be carried out."""
        foreign = foreign_origin(request, self.hosts)
        if foreign is not None:
            return OrderRefusal(403, foreign)
        if request.scope["method"] == "POST" and not is_json(request.headers.get("content-type")):
            return OrderRefusal(415, f"Content-Type must be {JSON}")
        if self.needs_token and not brings_token(request, self.token):
            return OrderRefusal(
                401,
                "orders need the token of this process: `tandem ctl` on this machine reads it, `tandem ctl "
                "--curve-keys FILE` derives it from the key file, other clients send Authorization: Bearer TOKEN "
                "(docs/operations.md)",
            )
        return None


def foreign_origin(request: HTTPConnection, hosts: AllowedHosts) -> str | None:
    """Why a request may come from a page of somebody else; None when it does not."""
    host = request.headers.get("host")
    if host is not None and not hosts.allow(host):
        return "this Host is not answered here: name it with --allowed-hosts, or use the address"
    origins = request.headers.getlist("origin")
    if any(urlsplit(origin).netloc.lower() != (host or "").lower() for origin in origins):
        return "requests of pages of another origin are not taken here"
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "requests of pages of another site are not taken here"
    return None


def is_json(content_type: str | None) -> bool:
    """Whether a Content-Type header says JSON; None: there is none."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() == JSON
