"""Random walks of two engines that change roles all the time: no token depends on where or how it was computed.

    request    begins on one engine alone, or is prefilled on one and decoded on the other, or is a turn of a session
    roles      change at random; running requests are left to the engine that decodes now, with their KV
    between    aborts, retractions or swaps, steps that raise, prefixes from host memory, drafts

What a request gets must be what an engine gives that computes one prompt after the other and keeps nothing.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random

import msgspec
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.base.names import RequestId
from tandem_engine.config import (
    CacheConfig,
    EngineConfig,
    HostConfig,
    PreemptionMode,
    SchedulerConfig,
    SpecAlgorithm,
    SpecConfig,
)
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide, SessionRef
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.verify.engine_pairs import Askers, Pair
from tandem_lab.verify.engines import Alone

CONTEXT = 400
CLOSE = 2e-4
"""Logprobs of runs of other lengths differ by roundings."""
NUDGE, NUDGES = 1e-6, 8
"""Of relative size, some ten roundings of float32; and how often ties are tried."""
MAX_TURNS = 2_000_000
REGEX = GrammarSpec(kind=GrammarKind.REGEX, source=r"[a-z ]{3,30}(!|\?)")
HOST = HostConfig(enable_cache=True, size_bytes=8 << 20, swap_bytes=4 << 20)
NGRAM = SpecConfig(algorithm=SpecAlgorithm.NGRAM, prompt_lookup_min=1, prompt_lookup_max=3, adaptive=False)
LEASE_S = 600.0
"""One thread turns both engines, so a step of one keeps the other from renewing what it has granted."""


def calm(config: EngineConfig) -> EngineConfig:
    """An engine that keeps nothing."""
    cache = CacheConfig(num_pages=2 + CONTEXT // 16, enable_prefix_cache=False)
    scheduler = SchedulerConfig(context_length=CONTEXT, max_running_requests=2, enable_overlap=False)
    return replace(config, cache=cache, scheduler=scheduler)


def restless(loaded: LoadedModel, dice: Random, *, host: bool) -> EngineConfig:
    """An engine with little room, on which something happens every few steps."""
    config, drafts = loaded.config, dice.random() < 0.4 and not loaded.model_config.state_parts
    page_size = dice.choice((1, 16, 64))
    pages = 2 + 4 * (CONTEXT // page_size + 1)
    cache = CacheConfig(page_size=page_size, num_pages=pages, host=HOST if host else HostConfig())
    scheduler = SchedulerConfig(
        context_length=CONTEXT,
        max_running_requests=6,
        audit_every_step=True,
        enable_overlap=dice.random() < 0.5,
        enable_mixed_chunk=dice.random() < 0.5,
        chunked_prefill_size=dice.choice((64, 80, 256)),
        force_retract_every=dice.choice((0, 5, 9)),
        force_fault_every=dice.choice((0, 11)),
        max_retractions=10_000,
        preemption_mode=PreemptionMode.SWAP if host and dice.random() < 0.5 else PreemptionMode.RECOMPUTE,
    )
    disagg = replace(config.disagg, grant_timeout=LEASE_S, hold_timeout=LEASE_S)
    speculative = NGRAM if drafts else SpecConfig()
    return replace(config, cache=cache, scheduler=scheduler, speculative=speculative, disagg=disagg)


@dataclass(kw_only=True, slots=True)
class Asked:
    """One request as its client knows it."""

    message: GenerateRequest
    whole: GenerateRequest
    """With the conversation before it, and nothing of where it is computed."""
    home: Engine
    attempts: list[str] = field(default_factory=list)
    aborted: bool = False


@dataclass(kw_only=True, slots=True)
class Chat:
    """A session: its turns and their text."""

    id: str
    home: Engine
    history: tuple[int, ...] = ()
    turns: int = 0


@dataclass(kw_only=True)
class Walk:
    """Use `walked`."""

    dice: Random
    engines: Sequence[Engine]
    askers: Askers
    vocab_size: int
    grammars: bool
    prefill: int = 0
    """Which of the engines has that role; with one engine it has both."""
    asked: dict[str, Asked] = field(default_factory=dict)
    ended: list[tuple[GenerateRequest, Generation, bool]] = field(default_factory=list)
    """What was asked for, what came, and whether it was aborted."""
    chats: list[Chat] = field(default_factory=list)
    moved: int = 0
    handed_over: int = 0
    _count: int = 0

    def run(self, requests: int) -> None:
        """Begin so many, or more until one has moved between two engines, and continue until all have ended."""
        begin = tuple(self._tokens(150))
        turns, paired = 0, len(self.engines) > 1
        while True:
            more = self._count < requests or (paired and not self.moved)
            if not more and not self.asked and all(engine.idle for engine in self.engines):
                break
            if more and len(self.asked) < 8 and self.dice.random() < 0.3:
                self._begin(begin)
            if self.asked and self.dice.random() < 0.01:
                self._abort(self.dice.choice([*self.asked.values()]))
            if paired and more and self.dice.random() < 0.08:
                self._change_roles()
            for engine in self.engines:
                engine.step()
            self._leave()
            self._take_ended()
            turns += 1
            assert turns < MAX_TURNS, f"no end: {[*self.asked]}"
        for chat in self.chats:
            chat.home.close_session(chat.id)
        for engine in self.engines:
            engine.step()

    @property
    def decode(self) -> Engine:
        return self.engines[-1 - self.prefill]

    # What is asked for

    def _tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(self.vocab_size) for _ in range(count)]

    def _begin(self, begin: tuple[int, ...]) -> None:
        """A request of any kind: `scored` wants the logprobs of its prompt, `none` the least output."""
        prompt = (*begin[: self.dice.choice((0, 0, 17, 64, 130))], *self._tokens(self.dice.randint(1, 60)))
        kind = self.dice.choice(
            ("greedy", "greedy", "seeded", "choices", "scored", "edited", "none", "chat", "grammar")
        )
        most = self.dice.choice((5, 20, 45))
        if kind == "choices":
            group, alone = f"group {self._count}", self._stays_alone()
            for seed in range(3):
                self._ask(prompt, self._sampling(most, temperature=0.9, seed=seed), group=group, alone=alone)
        elif kind == "chat":
            self._continue(prompt, most)
        elif kind == "grammar" and self.grammars:
            self._ask(prompt, self._sampling(most, grammar=REGEX, ignore_eos=False))
        else:
            options = {
                "seeded": {"temperature": 0.8, "seed": self.dice.randrange(99), "top_k": 20},
                "scored": {"prompt_logprobs": 0},
                "edited": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "bad_words": ((7,), (8, 9))},
                "none": {"max_tokens": 1},
            }.get(kind, {})
            self._ask(prompt, self._sampling(most, **options))

    def _sampling(self, most: int, **options: object) -> SamplingParams:
        plain = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, logprobs=0)
        return msgspec.structs.replace(plain, **options)

    def _continue(self, prompt: tuple[int, ...], most: int) -> None:
        """A turn of a chat whose last one has ended, or the first of another."""
        busy = {asked.message.session.id for asked in self.asked.values() if asked.message.session is not None}
        free = [chat for chat in self.chats if chat.id not in busy and len(chat.history) < CONTEXT // 2]
        if not free:
            free = [Chat(id=f"chat {self._count}", home=self.decode)]
            self.chats += free
        chat = self.dice.choice(free)
        keeps = self.dice.random() < 0.7
        session = SessionRef(id=chat.id, turn=chat.turns, keeps_output=keeps)
        new = prompt[-40:]
        sampling = self._sampling(most if keeps else 1)
        # Only the first turn may be handed over: the engine that decodes it keeps the conversation.
        alone = bool(chat.turns) or self._stays_alone()
        self._ask(new, sampling, session=session, history=chat.history, home=chat.home, alone=alone)

    def _stays_alone(self) -> bool:
        return len(self.engines) == 1 or self.dice.random() < 0.3

    def _ask(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        group: str = "",
        session: SessionRef | None = None,
        history: tuple[int, ...] = (),
        home: Engine | None = None,
        alone: bool | None = None,
    ) -> None:
        rid = f"r{self._count}"
        self._count += 1
        message = GenerateRequest(rid=rid, input_ids=prompt, sampling=sampling, group=group, session=session)
        whole = GenerateRequest(rid=rid, input_ids=(*history, *prompt), sampling=sampling)
        asked = Asked(message=message, whole=whole, home=home or self.decode, attempts=[rid])
        self.asked[rid] = asked
        self.askers.generations.expect(rid)
        sender = self.engines[self.prefill]
        if sender is asked.home or (self._stays_alone() if alone is None else alone):
            asked.home.add(message)
            return
        self.handed_over += 1
        self._both_ends(message, sender, asked.home, moving=False)

    @staticmethod
    def _both_ends(message: GenerateRequest, sender: Engine, receiver: Engine, *, moving: bool) -> None:
        for side, engine, other in ((HandoffSide.RECEIVE, receiver, sender), (HandoffSide.SEND, sender, receiver)):
            handoff = Handoff(side=side, room=message.rid, generation=1, peer=other.me, moving=moving)
            end = msgspec.structs.replace(message, handoff=handoff)
            if message.session is not None and side is HandoffSide.SEND:
                # As the gateway does: an output that ends with its first token would send no KV.
                longer = msgspec.structs.replace(message.sampling, max_tokens=max(2, message.sampling.max_tokens))
                end = msgspec.structs.replace(end, session=None, sampling=longer)
            engine.add(end)

    # What happens to it

    def _change_roles(self) -> None:
        self.prefill = 1 - self.prefill
        self.engines[self.prefill].decode_elsewhere(wanted=True)
        self.decode.decode_elsewhere(wanted=False)

    def _abort(self, asked: Asked) -> None:
        asked.aborted = True
        for engine in self.engines:
            engine.abort(RequestId(asked.attempts[-1]))

    def _leave(self) -> None:
        """Requests that an engine wants to leave to another move there."""
        leaving, self.askers.asked = self.askers.asked, []
        by_attempt = {asked.attempts[-1]: asked for asked in self.asked.values()}
        for rid in leaving:
            asked = by_attempt.get(rid)
            if asked is None or asked.aborted or asked.message.session is not None or asked.home is self.decode:
                continue
            if self.askers.generations.by_rid[rid].finished is None:
                self._move(asked)

    def _move(self, asked: Asked) -> None:
        self.moved += 1
        again = msgspec.structs.replace(
            asked.message,
            rid=f"{asked.message.rid} moved {len(asked.attempts)}",
            group="",
            resume_ids=self._said(asked),
            sampling=asked.message.sampling.without_prompt_logprobs(),
        )
        self.askers.generations.expect(again.rid, resumed=len(again.resume_ids))
        leaver, asked.home = asked.home, self.decode
        leaver.abort(RequestId(asked.attempts[-1]))
        self._both_ends(again, leaver, asked.home, moving=True)
        asked.attempts.append(again.rid)

    def _said(self, asked: Asked) -> tuple[int, ...]:
        """Of all attempts; one that was left may still stream a step, which no client reads."""
        output: tuple[int, ...] = ()
        for rid in asked.attempts:
            generation = self.askers.generations.by_rid[rid]
            output = (*output[: generation.resumed], *generation.token_ids)
        return output

    def _take_ended(self) -> None:
        for name, asked in [*self.asked.items()]:
            last = self.askers.generations.by_rid[asked.attempts[-1]]
            if last.finished is None:
                continue
            del self.asked[name]
            whole = self._whole(asked, last)
            self.ended.append((asked.whole, whole, asked.aborted))
            self._note_turn(asked, whole)

    def _whole(self, asked: Asked, last: Generation) -> Generation:
        """The output of all attempts."""
        whole = Generation(rid=asked.whole.rid, resumed=0, token_ids=self._said(asked), finished=last.finished)
        for rid in asked.attempts:
            generation = self.askers.generations.by_rid[rid]
            whole.logprobs = (*whole.logprobs[: generation.resumed], *generation.logprobs)
            whole.prompt_logprobs = whole.prompt_logprobs or generation.prompt_logprobs
        return whole

    def _note_turn(self, asked: Asked, whole: Generation) -> None:
        session = asked.message.session
        if session is None or whole.finish.reason is FinishReason.ABORT:
            return
        chat = next(chat for chat in self.chats if chat.id == session.id)
        chat.turns += 1
        chat.history = (*asked.whole.input_ids, *(whole.token_ids if session.keeps_output else ()))


@contextmanager
def walked(loaded: LoadedModel, dice: Random, *, requests: int, paired: bool) -> Iterator[Walk]:
    """A walk of `requests` requests that has come to its end, on two engines with host memory, or on one without."""
    config = restless(loaded, dice, host=paired)
    askers = Askers()
    facts = {
        "dice": dice,
        "askers": askers,
        "vocab_size": loaded.model_config.vocab_size,
        "grammars": loaded.vocabulary is not None,
    }
    if paired:
        maker = Alone(model=loaded)
        with Pair.build(maker, maker, config, sink=askers) as pair:
            walk = Walk(engines=(pair.prefill, pair.decode), **facts)
            walk.run(requests)
            yield walk
        return
    with Engine.build(loaded, config, sink=askers) as engine:
        walk = Walk(engines=(engine,), **facts)
        walk.run(requests)
        yield walk


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place at which two outputs differ: 0 is the first output token, -1 the last token of the prompt."""

    place: int
    text: str


def differences(loaded: LoadedModel, walk: Walk, folder: Path) -> list[str]:
    """What came that does not come of an engine that keeps nothing.

    Rounding decides a tie, of two tokens or of two experts, and an engine rounds otherwise when it computes a prompt in
    other chunks. A difference is left out where that engine's own output first differs at the same place once weights
    are moved by roundings. `folder` takes checkpoints with such weights.
    """
    with Engine.build(loaded, calm(loaded.config)) as engine:
        found = [
            (message, expected, difference)
            for message, got, aborted in walk.ended
            if (difference := _difference(expected := engine.generate([message])[0], got, aborted=aborted))
        ]
    for seed in range(NUDGES if found else 0):
        with Engine.build(_nudged(loaded, folder / str(seed), seed), calm(loaded.config)) as engine:
            found = [
                (message, expected, difference)
                for message, expected, difference in found
                if not (turned := _difference(expected, engine.generate([message])[0]))
                or turned.place != difference.place
            ]
    return [f"{message.rid} {difference.text}" for message, _, difference in found]


def _nudged(loaded: LoadedModel, folder: Path, seed: int) -> LoadedModel:
    """The model with vectors of weights, such as those of norms, that differ by `NUDGE` of their values."""
    shutil.copytree(loaded.config.model_path, folder)
    dice = torch.Generator().manual_seed(seed)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.dim() == 1 and tensor.is_floating_point():
                tensors[name] = tensor * (1 + NUDGE * torch.randn(tensor.shape, generator=dice))
        save_file(tensors, path, metadata={"format": "pt"})
    nudged = load(replace(loaded.config, model_path=str(folder)), progress=False)
    # The grammar process serves one tokenizer.
    return replace(nudged, vocabulary=loaded.vocabulary)


def _difference(expected: Generation, got: Generation, *, aborted: bool = False) -> Difference | None:
    tokens, wanted = got.token_ids, expected.token_ids
    cut = aborted and got.finish.reason is FinishReason.ABORT
    wanted = wanted[: len(tokens)] if cut else wanted
    pairs = [*zip(count(), got.logprobs, expected.logprobs, strict=False)]
    prompt, wanted_prompt = got.prompt_logprobs or (), expected.prompt_logprobs or ()
    pairs += [*zip(count(-len(prompt)), prompt, wanted_prompt, strict=False)][1:]
    places = {
        place: f"has logprobs that differ by {abs(one.logprob - other.logprob):.2g} at {place}"
        for place, one, other in pairs
        if abs(one.logprob - other.logprob) > CLOSE
    }
    same = next((n for n, (one, other) in enumerate(zip(tokens, wanted, strict=False)) if one != other), None)
    if same is not None or len(tokens) != len(wanted):
        places[min(len(tokens), len(wanted)) if same is None else same] = f"is {tokens}, not {wanted}"
    elif not cut and got.finish.reason is not expected.finish.reason:
        places[len(tokens)] = f"ended by {got.finish}, not {expected.finish}"
    return Difference(place=min(places), text=places[min(places)]) if places else None
