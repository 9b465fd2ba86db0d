"""`explain` and `chat` of `kubectl tandem` against a real gateway, reached through a forwarded port."""

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.health import Health
from tandem_services.common.sockets import listen
from tandem_services.gateway.admin import create_admin_app
from tandem_services.gateway.app import build_gateway
from tandem_services.gateway.observe.explain import RequestJournal
from tandem_services.gateway.serve import AdminServer
from tandem_testing.forwarding_api_server import ForwardingApiServer
from tandem_testing.gateway_builders import (
    EngineRack,
    FakeChooser,
    SessionShelf,
    config_of,
    fleet_of,
    priced_options_of,
    script,
    serving_gateway,
)
from tandem_testing.key_files import key_of, write_keys
from tandem_testing.kubernetes_objects import PODS, deployed
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, write_tokenizer

POD = "llama-gateway-7c"


@dataclass
class Deployed:
    """A gateway that an API server forwards to."""

    api: ForwardingApiServer
    kubeconfig: Path
    chooser: FakeChooser
    journal: RequestJournal

    async def run(self, *words: str, key: str | None = None, stdin: str = "") -> tuple[int, str, str]:
        """A command as its users start it: exit status, output, errors."""
        argv = [sys.executable, "-m", "tandem_services.cli.k8s.command", *words, "--kubeconfig", str(self.kubeconfig)]
        argv += ["--api-key", key] if key is not None else []
        done = await asyncio.to_thread(
            subprocess.run, argv, input=stdin, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
async def deployment(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path))
    keys = write_keys(tmp_path, ann={}, root={"admin": True})
    config = config_of(api_keys=keys, admin_port=1, ping_interval_s=5.0)
    with EngineRack() as rack, ForwardingApiServer(objects=deployed()) as api:
        says = scripted_tokens(script(tokenizer, "All is well.", eos=EOS))
        rack.add("solo", MockBehavior(token=says, eos=EOS))
        chooser = FakeChooser([engine.view for engine in rack.engines])
        fleet = fleet_of(config, chooser, SessionShelf(), rack.context, tokenizer)
        gateway = build_gateway(config, [fleet], clock=MonotonicClock(), health=Health())
        admin = AdminServer(uvicorn.Config(create_admin_app(gateway, drain=lambda: None), log_config=None))
        with listen("127.0.0.1", 0) as listener:
            serving = asyncio.create_task(admin.serve(sockets=[listener]))
            async with serving_gateway(gateway, config) as http:
                api.ports = {(POD, 8000): http.base_url.port, (POD, 8001): listener.getsockname()[1]}
                yield Deployed(api, api.kubeconfig(tmp_path), chooser, gateway.answering.journal)
            admin.should_exit = True
            await serving


async def test_conversation_is_held_and_its_request_explained(deployment):
    deployment.chooser.priced = priced_options_of(None, "solo@1", others=1, more=2)
    status, out, err = await deployment.run("chat", "llama", key=key_of("ann"), stdin="Hello\n")
    assert (status, err) == (0, "")
    assert "All is well." in out
    assert "solo" in out.splitlines()[-1]

    [record] = deployment.journal.latest(1)
    status, out, _ = await deployment.run("explain", f"chatcmpl-{record.request_id}", key=key_of("root"))
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"{record.request_id} · mock · /v1/chat/completions · 200 · ")
    assert "attempt 1: solo, alone, chosen by local" in out
    assert re.search(r"^ +other-0 +1\.5 s +64 \(48 host\) +128 +500 ms +1\.0 s$", out, re.MULTILINE)
    assert "→ solo" in out
    assert lines[-1] == "      and 2 more, dearer than these"
    status, out, _ = await deployment.run("explain", record.request_id, "-o", "json", key=key_of("root"))
    assert json.loads(out)["choices"][0]["attempts"][0]["candidates"]["more"] == 2


async def test_explain_of_unknown_request_reports_it(deployment):
    status, out, err = await deployment.run("explain", "unknown-id", key=key_of("root"))
    assert (status, out) == (1, "")
    assert "none of 1 gateways has unknown-id" in err


async def test_insufficient_key_error_names_required_rights(deployment):
    status, _, err = await deployment.run("explain", "any", key=key_of("ann"))
    assert status == 3
    assert f'{POD} requires a key with "admin": true' in err
    status, _, err = await deployment.run("chat", "llama", stdin="Hello\n")
    assert status == 3
    assert "key" in err


async def test_explain_without_running_gateway_names_the_namespace(deployment):
    deployment.api.objects[PODS] = []
    for words in (("chat", "llama"), ("explain", "any", "--service", "llama")):
        status, _, err = await deployment.run(*words)
        assert status == 3
        assert "no gateway of llama runs in namespace models (-n NAME)" in err
