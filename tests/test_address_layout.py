"""Hosts and ports are joined and split by `tandem_engine.base.addresses` alone: IPv6 addresses need brackets there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine/tandem_engine", "services/tandem_services", "operator/tandem_operator", "lab/tandem_lab")
ADDRESSES = "engine/tandem_engine/base/addresses.py"

SPLITTERS = {"partition", "rpartition", "split", "rsplit"}
SCHEME = re.compile(r"\b(tcp|http|https|ws|wss|redis|rediss|grpc)://$")
HOST = re.compile(r"host|addr|\bip\b|\.ip\b|endpoint|loopback|name", re.IGNORECASE)
PORT = re.compile(r"port", re.IGNORECASE)

OTHER_COLONS = {
    # No addresses: devices of RDMA and torch, control groups, kubeconfig paths, sizes of links, credentials of a URL.
    "engine/tandem_engine/disaggregation/transport.py": {"f'{port.parent.parent.name}:{port.name}'"},
    "engine/tandem_engine/disaggregation/nixl/agent.py": {"part.partition(':')"},
    "engine/tandem_engine/base/cgroups.py": {"line.split(':', 2)"},
    "engine/tandem_engine/executor/memory_profile.py": {"line.partition(':')"},
    "services/tandem_services/cli/k8s/cluster.py": {"str(config.KUBE_CONFIG_DEFAULT_LOCATION).split(':')"},
    # Functions of modules.
    "engine/tandem_engine/kernels/store/keys.py": {
        "self.function.rpartition(':')",
        "self.spec.function.rpartition(':')",
    },
    "engine/tandem_engine/kernels/cpu/kept.py": {"spec.function.partition(':')"},
    "services/tandem_services/cli/doctor/processor.py": {"line.partition(':')"},
    "lab/tandem_lab/cli/simulate.py": {"part.partition(':')"},
    "services/tandem_services/common/redis_url.py": {"credentials.partition(':')"},
    # Names of fields of server-sent events.
    "services/tandem_services/cli/chat/conversation.py": {"line.partition(':')"},
    # An adapter and its base: base:adapter.
    "services/tandem_services/gateway/models/model.py": {"f'{self.name}:{name}'", "name.rpartition(':')"},
    "services/tandem_services/gateway/api/adapter_list.py": {"named.rpartition(':')"},
    "services/tandem_services/gateway/models/catalog.py": {
        "name.rpartition(':')",
        "f'{service.model.name}:{name}'",
        "f\"'{quoted(each.service.model.name)}:{quoted(own)}'\"",
    },
    # The kubelet replaces the variable by a DNS name.
    "operator/tandem_operator/builders/worker.py": {"f'$(LWS_LEADER_ADDRESS):{MEETING_PORT}'"},
    "engine/tandem_engine/parallel/group.py": {"f'{named.type}:{(named.index or 0) + rank}'"},
}


def hand_made(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each expression that joins or splits what may be a host and a port."""
    for node in ast.walk(ast.parse(source)):
        joins = isinstance(node, ast.JoinedStr) and _joins(node)
        splits = isinstance(node, ast.Call) and _splits(node)
        scheme = isinstance(node, ast.Constant) and node.value == "tcp://"
        if joins or splits or scheme:
            yield node.lineno, ast.unparse(node)


def _joins(text: ast.JoinedStr) -> bool:
    parts = text.values
    for before, here, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
        if not isinstance(here, ast.Constant):
            continue
        if isinstance(after, ast.FormattedValue) and SCHEME.search(str(here.value)):
            return True
        colon = here.value == ":" and isinstance(before, ast.FormattedValue) and isinstance(after, ast.FormattedValue)
        if colon and (_names(before, HOST) or _names(after, PORT)):
            return True
        if str(here.value).endswith("]:") or (str(here.value).endswith(":") and after and _names(after, PORT)):
            return not str(here.value).endswith(": ")
    return False


def _names(part: ast.expr, what: re.Pattern[str]) -> bool:
    return isinstance(part, ast.FormattedValue) and what.search(ast.unparse(part.value)) is not None


def _splits(call: ast.Call) -> bool:
    named = isinstance(call.func, ast.Attribute) and call.func.attr in SPLITTERS
    return named and bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == ":"


def test_addresses_are_joined_and_split_in_one_module() -> None:
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name == ADDRESSES:
                continue
            known = OTHER_COLONS.get(name, set())
            found += [
                f"{name}:{line}: {text}" for line, text in hand_made(path.read_text("utf-8")) if text not in known
            ]
    assert found == [], "use tandem_engine.base.addresses.Address"


@pytest.mark.parametrize(
    "code",
    [
        'f"{host}:{port}"',
        'f"http://{host}:{port}/live"',
        'f"tcp://{self.host}"',
        'f"[{host}]:{port}"',
        'f"127.0.0.1:{port}"',
        'text.rpartition(":")',
        'text.rsplit(":", 1)',
        'endpoint.removeprefix("tcp://")',
        'f"redis://{name}:{PORT}/0"',
    ],
)
def test_hand_made_address_is_found(code: str) -> None:
    assert list(hand_made(code))


@pytest.mark.parametrize(
    "code", ['f"{worker}: {reason}"', 'f"ipc://{folder}/control"', 'f"{a}:{b}"', 'text.split(",")']
)
def test_text_without_hand_made_addresses_passes(code: str) -> None:
    assert not list(hand_made(code))
