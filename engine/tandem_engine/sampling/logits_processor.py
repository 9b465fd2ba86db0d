"""Edits of logits that requests ask for, in one fixed order, and the token history that they need.

    raw logits ─▶ penalties ─▶ grammar ─▶ logit_bias ─▶ allowed_token_ids ─▶ bad words, stop ids below min_tokens

A bias cannot lift what a grammar or a later rule forbids. If rules together leave a row without any of its
`allowed_token_ids`, the last ones are dropped first, so every row ends with a token that the client allowed; unless its
grammar forbids all of these, and then settlement ends the request. Rows without edits cost nothing. A step calls `edit`
once, then `record` once its tokens are known.

`apply_masks` makes the logits of forbidden tokens −inf. Each row of the packed mask names its row of logits, so a batch
with few grammars, or with several positions of one, cannot mix them up [mask-per-row].

`TokenCounts` has, per slot, how often the output has each token, and which tokens the prompt has. A slot is loaded when
a request first samples on its row; penalties apply before each token [penalties-once]; each token is recorded right
after it is chosen, in the order of the steps, so that no step reads stale counts [device-history] and every accepted
draft counts [every-accepted-token]. The scheduler numbers slots from 0, for requests with a penalty only. A step in
flight may still count for a finished request; the next owner's load discards that. A request has seen a few hundred of
152k tokens, so each slot lists them, and a step reads and writes only their logits:

    counts, in_prompt   [C, V]   by token
    seen                [C, W]   seen[c, :lens[c]] are the tokens of slot c; the rest are any tokens, unaffected by it

    repetition   logit > 0 ? logit / r : logit · r     tokens of prompt and output
    frequency    logit − f · count                     tokens of the output
    presence     logit − p                             tokens of the output

in this order, as vLLM does, element by element. `TokenTails` has the last few tokens of rows with bad words: loaded
like slots, then shifted after every step [device-history], and as long as the longest sequence requires.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem_engine.forward.batch import TokenMasks
from tandem_engine.forward.logit_edits import ANY, BadWords, LogitEdits, Penalties, TokenSets
from tandem_engine.messages.sampling import MAX_BAD_WORD_TOKENS


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Put −inf into `logits` [S, V] float wherever a row's mask forbids the token, in place.

    Waits until the masks are there. Raises `MasksLateError` when they do not come.
    """
    forbidden = _forbidden(masks.wait(), logits.shape[1])
    if masks.rows == (*range(len(logits)),):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    rows = torch.tensor(masks.rows)
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def _forbidden(bitmask: Tensor, vocab_size: int) -> Tensor:
    """bool [G, vocab_size] of a packed mask [G, words]; tokens beyond its words are forbidden."""
    clear = np.invert(bitmask.numpy())
    bits = np.unpackbits(clear.view(np.uint8), axis=1, bitorder="little")
    missing = max(0, vocab_size - bits.shape[1])
    if missing:
        bits = np.pad(bits, ((0, 0), (0, missing)), constant_values=1)
    return torch.from_numpy(bits[:, :vocab_size]).view(torch.bool)


BLOCK = 2**20
"""Logits that are penalized at a time. Temporaries of all rows together would be too large for a processor's caches,
and for its allocator to keep."""

FIRST_WIDTH = 256


class PenaltyRows:
    """Counts of C slots over V tokens, 5 bytes for each pair. Belongs to the thread that runs forwards."""

    def __init__(self) -> None:
        self._counts = torch.empty(0, 0, dtype=torch.int32)
        self._in_prompt = torch.empty(0, 0, dtype=torch.bool)
        self._seen = torch.empty(0, 0, dtype=torch.int64)
        self._lens = torch.empty(0, dtype=torch.int64)
        self._room = 0
        """Tokens that may be recorded for every slot before `seen` could be full."""

    @property
    def capacity(self) -> int:
        """Slots that there is memory for."""
        return len(self._counts)

    def load(
        self,
        slot: int,
        prompt_ids: Sequence[int] | Tensor,
        output_ids: Sequence[int] | Tensor,
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make `slot` know these tokens and no others."""
        if slot >= self.capacity:
            self._grow(slot + 1, vocab_size, device)
        outputs = torch.as_tensor(output_ids, dtype=torch.int64, device=device)
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64, device=device)
        seen = torch.unique(torch.cat((prompt, outputs)))
        self._make_room(len(seen))
        self._forget(slot)
        self._counts[slot].index_put_((outputs,), torch.ones_like(outputs, dtype=torch.int32), accumulate=True)
        self._in_prompt[slot, prompt] = True
        self._seen[slot, : len(seen)] = seen
        self._lens[slot] = len(seen)

    def record(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count what was generated: `token_ids` [P, K] of `slots` [P], −1 where a row has fewer than K."""
        if self._room < token_ids.shape[1]:
            self._make_room(int(self._lens.max()) + token_ids.shape[1])
        self._room -= token_ids.shape[1]
        for token_id in token_ids.unbind(dim=1):
            counted, token = token_id >= 0, token_id.clamp(min=0)
            lens = self._lens[slots]
            new = counted & (self._counts[slots, token] == 0) & ~self._in_prompt[slots, token]
            self._seen[slots, lens] = token  # behind the end, where any token may stand, unless it is new
            self._lens[slots] = lens + new
            self._counts.index_put_((slots, token), counted.int(), accumulate=True)

    def apply(self, logits: Tensor, penalties: Penalties, ahead: Tensor | None = None) -> None:
        """Penalize rows of `logits` [S, V] float32 in place.

        Args:
            ahead: [S, K] tokens that come before each row beside those counted, −1 for none: the drafts before a
                position whose logits are wanted in the same step [every-accepted-token].
        """
        drafts = 0 if ahead is None else ahead.shape[1]
        for rows, width in self._blocks(penalties.slots, drafts):
            self._apply_block(logits, penalties, rows, width, ahead)

    def _blocks(self, slots: Tensor, drafts: int) -> Iterator[tuple[Tensor, int]]:
        """Places in `slots`, and the most tokens any of them has seen: those of about as many go together."""
        lens = self._lens[slots].tolist()
        alike: dict[int, list[int]] = {}
        for place, length in enumerate(lens):
            if length or drafts:
                alike.setdefault(length.bit_length(), []).append(place)
        for places in alike.values():
            width = max(lens[place] for place in places)
            at_once = max(1, BLOCK // ((width + drafts) * (1 + drafts)))
            for first in range(0, len(places), at_once):
                yield torch.tensor(places[first : first + at_once], device=slots.device), width

    def _apply_block(
        self, logits: Tensor, penalties: Penalties, rows: Tensor, width: int, ahead: Tensor | None
    ) -> None:
        index, slots = penalties.index[rows, None], penalties.slots[rows, None]
        tokens = self._seen[slots, torch.arange(width, device=slots.device)]
        drafts = None if ahead is None else ahead[index.squeeze(1)]
        if drafts is not None:
            tokens = torch.cat((tokens, drafts.clamp(min=0)), dim=1)
        counts = self._counts[slots, tokens]
        if drafts is not None:
            counts += (tokens[:, :, None] == drafts[:, None, :]).sum(dim=2, dtype=torch.int32)
        generated = counts > 0
        known = generated | self._in_prompt[slots, tokens]
        before = logits[index, tokens]
        strength = penalties.repetition[rows, None]
        after = torch.where(known, torch.where(before > 0, before / strength, before * strength), before)
        after -= penalties.frequency[rows, None] * counts
        after -= penalties.presence[rows, None] * generated
        logits[index, tokens] = after

    def _forget(self, slot: int) -> None:
        """Counts are zero everywhere else already."""
        seen = self._seen[slot, : int(self._lens[slot])]
        self._counts[slot, seen] = 0
        self._in_prompt[slot, seen] = False

    def _make_room(self, length: int) -> None:
        """Have `seen` hold `length` tokens of any slot, and one that is not counted."""
        longest = max(length, int(self._lens.max()))
        width = self._seen.shape[1]
        if width <= longest:
            wider = torch.zeros(
                self.capacity, max(FIRST_WIDTH, 2 * longest), dtype=torch.int64, device=self._seen.device
            )
            wider[:, :width] = self._seen
            self._seen = wider
        self._room = self._seen.shape[1] - 1 - longest

    def _grow(self, slots: int, vocab_size: int, device: torch.device | str) -> None:
        capacity, width = max(slots, 2 * self.capacity), self._seen.shape[1]
        counts = torch.zeros(capacity, vocab_size, dtype=torch.int32, device=device)
        in_prompt = torch.zeros(capacity, vocab_size, dtype=torch.bool, device=device)
        seen = torch.zeros(capacity, width, dtype=torch.int64, device=device)
        lens = torch.zeros(capacity, dtype=torch.int64, device=device)
        if self.capacity:
            counts[: self.capacity] = self._counts
            in_prompt[: self.capacity] = self._in_prompt
            seen[: self.capacity] = self._seen
            lens[: self.capacity] = self._lens
        self._counts, self._in_prompt, self._seen, self._lens = counts, in_prompt, seen, lens


TAIL = MAX_BAD_WORD_TOKENS - 1
"""Tokens remembered per row: all of the longest sequence but its end."""

_NOTHING = -2
"""Before the first output token. Equals no token id and is not `ANY`."""


class TokenTails:
    """[rows, TAIL] the newest tokens of each req_pool_idx, right-aligned. Belongs to the thread that runs forwards."""

    def __init__(self) -> None:
        self._tails = torch.empty(0, TAIL, dtype=torch.int64)

    def load(self, row: int, output_ids: Sequence[int] | Tensor, *, device: torch.device | str = "cpu") -> None:
        """Make `row` know the end of this output and nothing before."""
        if row >= len(self._tails):
            self._grow(row + 1, device)
        tail = torch.as_tensor(output_ids[-TAIL:], dtype=torch.int64, device=device)
        self._tails[row] = _NOTHING
        self._tails[row, TAIL - len(tail) :] = tail

    def record(self, rows: Tensor, token_ids: Tensor) -> None:
        """Append what was generated: `token_ids` [Q, K] of `rows` [Q], −1 after a row's last where it has fewer."""
        self._tails[rows] = self._after(rows, token_ids)

    def forbid(self, logits: Tensor, words: BadWords, ahead: Tensor | None = None) -> None:
        """Set logits [S, V] that would complete a sequence to −inf, in place. `ahead` as in `PenaltyRows.apply`."""
        tails = self._tails[words.rows] if ahead is None else self._after(words.rows, ahead[words.index])
        wanted = words.prefixes
        complete = ((tails[:, TAIL - wanted.shape[1] :] == wanted) | (wanted == ANY)).all(dim=1)
        # Added, for two sequences may end in the same token and only one of them be complete.
        ban = torch.where(complete, -torch.inf, 0.0)
        logits.index_put_((words.index, words.last), ban, accumulate=True)

    def _after(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """[R, TAIL] the tails of `rows` [R] once `token_ids` [R, K] have been appended, −1 for none at the end."""
        longer = torch.cat((self._tails[rows], token_ids), dim=1)
        appended = (token_ids >= 0).sum(dim=1, keepdim=True)
        return longer.gather(1, appended + torch.arange(TAIL, device=longer.device))

    def _grow(self, rows: int, device: torch.device | str) -> None:
        tails = torch.full((max(rows, 2 * len(self._tails)), TAIL), _NOTHING, dtype=torch.int64, device=device)
        tails[: len(self._tails)] = self._tails
        self._tails = tails


class TokenCounts(Protocol):
    """Of penalized rows."""

    def record(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count `token_ids` [P, K] of `slots` [P], −1 where a row has fewer than K."""
        ...


def record_tokens(counts: TokenCounts, tails: TokenTails, edits: LogitEdits | None, token_ids: Tensor) -> None:
    """Notify both of the tokens that rows [S] of a step got: `token_ids` [S, K], −1 after a row's last.

    `edits` has one entry per request: not those of `over_runs`.
    """
    if edits is None:
        return
    if edits.penalties is not None:
        counts.record(edits.penalties.slots, token_ids[edits.penalties.index])
    if edits.bad_words is not None:
        tails.record(edits.bad_words.recalled_rows, token_ids[edits.bad_words.recalled_index])


_NO_EDITS = LogitEdits()


class LogitEditor:
    """Edits logits. Owns the token history of penalized rows; belongs to the thread that runs forwards."""

    def __init__(self) -> None:
        self.penalties = PenaltyRows()
        self.tails = TokenTails()

    def edit(
        self,
        logits: Tensor,
        edits: LogitEdits | None,
        suppress: tuple[tuple[int, ...], ...] = (),
        *,
        masks: TokenMasks | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """`logits` [S, V] float32 as they are to be sampled from; a copy unless no row has an edit.

        Args:
            edits: their `histories` are taken in first.
            suppress: per row, token ids that must not be chosen; () for none.
            masks: what grammars allow; waited for. Raises `MasksLateError` when they do not come.
            ahead: [S, K] drafts before each row, −1 for none, when several positions of a request are in one step;
                `edits` are then those of `LogitEdits.over_runs`.
        """
        if edits is None and masks is None and not any(suppress):
            return logits
        edits = edits or _NO_EDITS
        logits = logits.clone()
        self._load(edits, logits)
        if edits.penalties is not None:
            self.penalties.apply(logits, edits.penalties, ahead)
        if masks is not None:
            apply_masks(logits, masks)
        if edits.biases is not None:
            logits[edits.biases.index, edits.biases.token_ids] += edits.biases.values
        allowed = None if edits.allowed is None else _keep_only(logits, edits.allowed)
        _forbid(logits, edits.forbidden)
        if edits.bad_words is not None:
            self.tails.forbid(logits, edits.bad_words, ahead)
        _forbid(logits, _pairs(suppress, logits.device))
        if allowed is not None:
            allowed.restore_if_empty(logits)
        return logits

    def record(self, edits: LogitEdits | None, token_ids: Tensor) -> None:
        """Remember the tokens that rows of the step got; see `record_tokens`."""
        record_tokens(self.penalties, self.tails, edits, token_ids)

    def _load(self, edits: LogitEdits, logits: Tensor) -> None:
        for history in edits.histories:
            if history.slot is not None:
                self.penalties.load(
                    history.slot,
                    history.prompt_ids,
                    history.output_ids,
                    vocab_size=logits.shape[1],
                    device=logits.device,
                )
            self.tails.load(history.row, history.output_ids, device=logits.device)


class _Allowed:
    """Rows of logits before anything of what they are allowed was forbidden."""

    def __init__(self, logits: Tensor, rows: Tensor) -> None:
        self._rows = rows
        self._logits = logits[rows]

    def restore_if_empty(self, logits: Tensor) -> None:
        """Undo later rules in the rows that they have emptied."""
        now = logits[self._rows]
        empty = now.amax(dim=1, keepdim=True) == -torch.inf
        logits[self._rows] = torch.where(empty, self._logits, now)


def _keep_only(logits: Tensor, allowed: TokenSets) -> _Allowed:
    rows = torch.unique(allowed.index)
    kept = logits[allowed.index, allowed.token_ids]
    logits[rows] = -torch.inf
    logits[allowed.index, allowed.token_ids] = kept
    return _Allowed(logits, rows)


def _forbid(logits: Tensor, tokens: TokenSets | None) -> None:
    if tokens is not None:
        logits[tokens.index, tokens.token_ids] = -torch.inf


def _pairs(suppress: tuple[tuple[int, ...], ...], device: torch.device) -> TokenSets | None:
    rows = [row for row, ids in enumerate(suppress) for _ in ids]
    if not rows:
        return None
    ids = [token for ids in suppress for token in ids]
    return TokenSets(index=torch.tensor(rows, device=device), token_ids=torch.tensor(ids, device=device))
