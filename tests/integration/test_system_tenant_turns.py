"""What a real engine computes between the arrival of a short prompt and its first token, beside another tenant's."""

from dataclasses import dataclass, field, replace
from random import Random

import pytest

from tandem_engine.config import CacheConfig, EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.scheduler.prefill_adder import BESIDE_BEHIND
from tandem_services.cli.flags import bundled_model
from tandem_testing.scheduler_builders import make_message

SHORT, LONG, MANY = 40, 1500, 100
"""Tokens of a short and of a long prompt; a long queue."""
STEPS = 2
"""The one that computes it, and the one that is launched before that has settled."""


def prompt(random: Random, tokens: int) -> list[int]:
    """Different each time, so that no prefix is cached."""
    return [random.randrange(10, 900) for _ in range(tokens)]


def crowd(kind: str, tenant: str) -> list[GenerateRequest]:
    """What `tenant` has queued."""
    random = Random(kind)
    match kind:
        case "long_prompts":
            prompts = [prompt(random, LONG) for _ in range(4)]
        case "many_prompts":
            prompts = [prompt(random, SHORT) for _ in range(MANY)]
        case "long_outputs":
            return [make_message(f"b{n}", prompt(random, 20), tenant=tenant, max_tokens=60) for n in range(8)]
        case _:
            same = prompt(random, 20)
            return [make_message(f"b{n}", same, tenant=tenant, max_tokens=8, group="n") for n in range(60)]
    return [make_message(f"b{n}", tokens, tenant=tenant, max_tokens=2) for n, tokens in enumerate(prompts)]


@dataclass
class Seen:
    """Receives what an engine sends."""

    tokens: dict[str, list[int]] = field(default_factory=dict)

    def __call__(self, client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        del client
        for output in outputs:
            self.tokens.setdefault(output.rid, []).extend(output.token_ids)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    cache = CacheConfig(num_pages=700)
    return load(EngineConfig(model_path=str(bundled_model()), dtype="float32", cache=cache, threads=1), progress=False)


def computed(engine: Engine, messages: list[GenerateRequest], seen: Seen) -> int:
    """Tokens of `messages` that steps were launched for."""
    live = engine.scheduler.queues.requests
    ended = [message for message in messages if message.rid not in live]
    whole = sum(len(message.input_ids) + len(seen.tokens[message.rid]) - 1 for message in ended)
    return whole + sum(req.launched_len for req in live.values() if req.rid != "short")


def run_until_idle(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def before_first_token(loaded: LoadedModel, kind: str, *, tenant: str) -> tuple[int, list[int]]:
    """Tokens of the crowd computed until the short prompt has its first token, and the output of that prompt."""
    seen = Seen()
    config = replace(loaded.config, scheduler=replace(loaded.config.scheduler, audit_every_step=True))
    with Engine.build(loaded, config, sink=seen) as engine:
        # Both tenants have been here: steps are small when the crowd comes.
        engine.add(make_message("earlier", [5, 6, 7], tenant="small", max_tokens=1))
        run_until_idle(engine)
        messages = crowd(kind, tenant)
        for message in messages:
            engine.add(message)
        for _ in range(6):
            engine.step()
        already = computed(engine, messages, seen)
        engine.add(make_message("short", prompt(Random(1), SHORT), tenant="small", max_tokens=4))
        while not seen.tokens.get("short"):
            engine.step()
        more = computed(engine, messages, seen) - already
        run_until_idle(engine)
        assert engine.audit().problems == ()
    return more, seen.tokens["short"]


@pytest.mark.parametrize("kind", ["long_prompts", "many_prompts", "long_outputs", "choices"])
def test_tokens_before_a_first_token_are_of_two_steps(loaded, kind):
    shared, rows = loaded.config.scheduler.shared_prefill_tokens, loaded.config.scheduler.max_running_requests
    more, output = before_first_token(loaded, kind, tenant="big")
    if "prompts" in kind:
        # The step that computes the short prompt has few tokens of others.
        assert more <= shared // BESIDE_BEHIND
    # Each step: its share of prompts, and a token for each request that decodes.
    assert more <= STEPS * (shared + rows)
    _, expected = before_first_token(loaded, kind, tenant="small")
    assert output == expected


def test_prompts_of_one_tenant_are_computed_in_arrival_order(loaded):
    """What the bound is worth: the same requests of one tenant are computed in order of arrival."""
    more, _ = before_first_token(loaded, "long_prompts", tenant="small")
    assert more > LONG
