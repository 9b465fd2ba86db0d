"""What the writing engine knows about one handoff.

    sequence   0 ────── grant.first_token ───────────── committed_len ────────── total
    pages        cached by the receiver │ granted page 0, 1, … `pushed` │ not settled yet
                                        └── pushed, or outstanding ──┘

Only settled tokens are pushed: a chunk that is launched but not settled is not in its pages yet (T70).
A page counts as settled when all its tokens are; the last, partial one when the whole prompt is.
"""

from dataclasses import dataclass, field

from tandem_engine.disaggregation.grants import Grant
from tandem_engine.disaggregation.room_key import RoomKey
from tandem_engine.disaggregation.transport import Push, PushKey
from tandem_engine.messages.requests import Peer
from tandem_engine.names import PageId
from tandem_engine.scheduler.request import Request


@dataclass(kw_only=True, slots=True)
class SendRoom:
    """One request whose KV goes to `peer`."""

    key: RoomKey
    req: Request
    peer: Peer
    total: int
    """Tokens whose KV goes over: prompt and resumed output."""
    grant: Grant | None = None
    pushed: int = 0
    """Granted pages that were pushed or are being pushed."""
    outstanding: dict[PushKey, tuple[PageId, ...]] = field(default_factory=dict)
    """Source pages of each push under way."""
    digests: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of each finished push, by its first page."""
    keep_until: float | None = None
    """Monotonic. Set when the prompt is computed and the request is kept for its transfer alone."""
    moved_at: float = 0.0
    """Monotonic. When a push last started or ended."""

    def next_push(self, max_pages: int) -> Push | None:
        """The next run of settled pages that was not pushed yet, at most `max_pages`; None if there is none."""
        grant, kv = self.grant, self.req.kv
        if grant is None or kv is None:
            return None
        skipped = grant.first_token // kv.page_size
        end = min(self._settled_pages() - skipped, self.pushed + max_pages)
        if end <= self.pushed:
            return None
        key = PushKey(room=self.key.room, generation=self.key.generation, first=self.pushed, count=end - self.pushed)
        return Push(
            key=key,
            peer=self.peer.incarnation,
            source=tuple(kv.pages[skipped + self.pushed : skipped + end]),
            target=grant.pages[self.pushed : end],
            digest=grant.digest,
            start_before=grant.expires,
        )

    def started(self, push: Push) -> None:
        self.pushed += push.key.count
        self.outstanding[push.key] = push.source

    def done(self, key: PushKey, digests: tuple[int, ...]) -> bool:
        """Note a finished push. False: its source pages changed hands under way, what went out is not known.

        The cache may take over a request's page in favour of an equal one and free the original.
        """
        source = self.outstanding.pop(key)
        self.digests[key.first] = digests
        return self._owned(key, source)

    @property
    def complete(self) -> bool:
        """Every granted page has been written."""
        return self.grant is not None and not self.outstanding and self.pushed == len(self.grant.pages)

    def all_digests(self) -> tuple[int, ...]:
        """One per granted page, in order. Only of a complete room."""
        return tuple(digest for first in sorted(self.digests) for digest in self.digests[first])

    def _settled_pages(self) -> int:
        kv = self.req.held_kv
        settled = min(kv.committed_len, self.total)
        # A step in flight may still append a token to the partial page, which would tear its digest.
        whole_prompt = settled == self.total and self.keep_until is not None and not self.req.steps_in_flight
        return -(-settled // kv.page_size) if whole_prompt else settled // kv.page_size

    def _owned(self, key: PushKey, source: tuple[PageId, ...]) -> bool:
        kv, grant = self.req.kv, self.grant
        if kv is None or grant is None:
            return False
        start = grant.first_token // kv.page_size + key.first
        return tuple(kv.pages[start : start + key.count]) == source
