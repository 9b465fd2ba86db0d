"""State of one handoff at the writing engine.

    sequence   0 ────── grant.first_token ───────────── committed_len ────────── total
    pages        cached by the receiver │ granted page 0, 1, … `pushed` │ not completed yet
                                        └── pushed, or outstanding ──┘

The KV of a chunk that is launched but not completed is not in its pages yet [settled-only-sent]. A chunk is pushed when
its step has completed, or early: bound to the step, layer by layer as the step writes them. A page is pushed once all
its tokens are there, and the last, partial one once the whole prompt is.

Early pushes are final unless their step fails, or one before it that it was launched on. Then the request is recomputed
from its last committed token, and what was pushed of later ones is pushed again, which costs the receiver only bytes.
It reads no page before the handoff record, and that follows the last good push.

Where layers keep states, the state after the last token goes last, from the request's row: once the prompt is computed,
no step here changes it.
"""

from dataclasses import dataclass, field, replace

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.base import RoomKey
from tandem_engine.disaggregation.grants import Grant
from tandem_engine.disaggregation.transport import Push, PushKey
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import STATES
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
    early: set[PushKey] = field(default_factory=set)
    """Of them, those of pages that a step is computing."""
    early_of: RequestKv | None = None
    """Whose pages the early ones are: another one takes its place when a step fails."""
    void: set[PushKey] = field(default_factory=set)
    """Pushes under way of what a failed step left. Nothing is started before they are over: it might be overtaken."""
    digests: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of each finished push, by its first page."""
    keep_until: float | None = None
    """Monotonic. Set when the prompt is computed and the request is kept for its transfer alone."""
    began_at: float | None = None
    """Monotonic. When the first push started."""
    moved_at: float = 0.0
    """Monotonic. When a push last started or ended, or more could be pushed."""
    progress: KvProgress | None = None
    """Of the newest step that computes part of the prompt."""
    state_pushed: bool = False
    """Or being pushed."""
    state_digests: tuple[int, ...] = ()

    def next_push(self, max_pages: int) -> Push | None:
        """The next run of settled pages that was not pushed yet, at most `max_pages`; None if there is none."""
        self._take_back_void()
        return None if self.req.kv is None else self._push(self._settled_pages(), max_pages)

    def early_push(self, stop: int, progress: KvProgress, max_pages: int) -> Push | None:
        """The same of pages that are full, or hold the whole prompt, once a step has computed tokens up to `stop`.

        `progress` is that step's: the push follows it. All earlier steps are over before it begins.
        """
        self._take_back_void()
        page_size = self.req.held_kv.page_size
        pages = -(-stop // page_size) if stop == self.total else stop // page_size
        push = self._push(pages, max_pages)
        return None if push is None else replace(push, progress=progress)

    def state_push(self) -> Push | None:
        """That of the state after the whole prompt, which is settled by then; None if it was, or there is none."""
        grant, kv = self.grant, self.req.kv
        if self.state_pushed or self.keep_until is None or grant is None or grant.state is None or kv is None:
            return None
        return Push(
            key=PushKey(room=self.key.room, generation=self.key.generation, first=0, count=1, group=STATES),
            peer=self.peer.incarnation,
            source=(PageId(kv.row),),
            target=(grant.state,),
            digest=grant.digest,
            start_before=grant.expires,
        )

    def _push(self, pages: int, max_pages: int) -> Push | None:
        """The next run of the sequence's first `pages` pages."""
        grant, kv = self.grant, self.req.kv
        if grant is None or kv is None or self.void:
            return None
        skipped = grant.first_token // kv.page_size
        end = min(pages - skipped, self.pushed + max_pages)
        if end <= self.pushed:
            return None
        key = PushKey(room=self.key.room, generation=self.key.generation, first=self.pushed, count=end - self.pushed)
        return Push(
            key=key,
            peer=self.peer.incarnation,
            source=tuple(kv.pages[skipped + self.pushed : skipped + end]),
            target=grant.pages[self.pushed : end],
            digest=grant.digest,
            tail=self.total % kv.page_size if end == len(grant.pages) else 0,
            start_before=grant.expires,
        )

    def started(self, push: Push) -> None:
        if push.key.group == STATES:
            self.state_pushed = True
        else:
            self.pushed += push.key.count
        self.outstanding[push.key] = push.source
        if push.progress is not None:
            self.early.add(push.key)
            self.early_of = self.req.kv

    def done(self, key: PushKey, digests: tuple[int, ...]) -> bool:
        """Note a finished push. False: its source pages changed hands under way, what went out is not known.

        The cache may take over a request's page in favor of an equal one and free the original.
        """
        self._take_back_void()
        source = self.outstanding.pop(key)
        self.early.discard(key)
        if key in self.void:
            self.void.remove(key)
            return True
        if key.group == STATES:
            self.state_digests = digests
            return self.req.kv is not None and source == (PageId(self.req.kv.row),)
        self.digests[key.first] = digests
        return self._owned(key, source)

    def failed(self, key: PushKey) -> bool:
        """Note a push that did not get through. True: its pages go again, once they are settled."""
        self._take_back_void()
        del self.outstanding[key]
        if key in self.void:
            self.void.remove(key)
            return True
        if key in self.early:
            self.early.remove(key)
            self._take_back(key.first)
            return True
        return False

    @property
    def complete(self) -> bool:
        """Every granted page has been written, and the state where there is one."""
        if self.grant is None or self.outstanding or self.pushed != len(self.grant.pages):
            return False
        return self.state_pushed or self.grant.state is None

    @property
    def written(self) -> int:
        """Granted pages that are written for good."""
        return sum(len(digests) for digests in self.digests.values())

    def exposed(self, now: float) -> float:
        """Seconds that the transfer, the wait for its grant included, has taken since the prompt was computed."""
        ended_at = None if self.progress is None else self.progress.ended_at
        return 0.0 if ended_at is None else max(0.0, now - ended_at)

    def all_digests(self) -> tuple[int, ...]:
        """One per granted page, in order. Only of a complete room."""
        return tuple(digest for first in sorted(self.digests) for digest in self.digests[first])

    def _take_back_void(self) -> None:
        """A step that failed put the request back at its last settled token, in a new holding of the same pages."""
        if self.early_of is None or self.req.kv is self.early_of:
            return
        self.early_of = None
        if self.grant is not None and self.req.kv is not None:
            settled = (self.req.kv.committed_len - self.grant.first_token) // self.req.kv.page_size
            self._take_back(max(0, settled))

    def _take_back(self, first: int) -> None:
        """What was pushed from granted page `first` on is of no use, nor is the rest of a push that has it."""
        pushes = {start: len(digests) for start, digests in self.digests.items()}
        pages = {key for key in self.outstanding if key.group != STATES}
        pushes |= {key.first: key.count for key in pages}
        self.pushed = min([self.pushed, first, *(start for start, count in pushes.items() if start + count > first)])
        self.digests = {start: digests for start, digests in self.digests.items() if start < self.pushed}
        self.void |= {key for key in pages if key.first >= self.pushed}

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
