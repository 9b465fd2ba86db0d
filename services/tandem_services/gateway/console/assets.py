"""The page itself: a few files of the package, read once, sent with headers that allow nothing but themselves.

No script, style or connection from or to any other place; no inline script; no text becomes markup (Trusted Types, in
browsers that have them); no frame around the page.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files

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
    # Asked for again each time, and answered 304: a new release of the gateway is a new page at once.
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
