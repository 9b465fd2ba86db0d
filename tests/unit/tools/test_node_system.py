"""What a node changes in the machine is undone: chains of its own alone, cgroups from the deepest."""

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools/kube"

FILTER = """\
*filter
:INPUT ACCEPT [0:0]
:MINE - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -j KUBE-FIREWALL
-A INPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A INPUT -j MINE
-A KUBE-SERVICES -g KUBE-FIREWALL
COMMIT
"""


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import node_system

    yield node_system
    sys.modules.pop("node_system", None)


@pytest.fixture
def commands(system, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], str | None]]:
    """What would have been run; iptables has the chains above, ip6tables has none."""
    seen = []

    def run(*words: object, check: bool = True, text: str | None = None) -> str:
        seen.append((tuple(map(str, words)), text))
        return FILTER if words == ("iptables-save", "-t", "filter") else ""

    monkeypatch.setattr(system, "run", run)
    return seen


def test_only_chains_of_services_are_found(system, commands):
    assert system.service_chains() == [("iptables", "filter", "KUBE-FIREWALL"), ("iptables", "filter", "KUBE-SERVICES")]


def test_remove_chains_removes_only_service_chains_and_jumps(system, commands):
    system.remove_chains(system.service_chains())
    ((command, script),) = [(words, text) for words, text in commands if words[0] == "iptables-restore"]
    assert command == ("iptables-restore", "--noflush")
    assert script.splitlines() == [
        "*filter",
        "-D INPUT -j KUBE-FIREWALL",
        '-D INPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        "-D KUBE-SERVICES -g KUBE-FIREWALL",
        "-F KUBE-FIREWALL",
        "-F KUBE-SERVICES",
        "-X KUBE-FIREWALL",
        "-X KUBE-SERVICES",
        "COMMIT",
    ]


def test_iptables_chains_that_were_there_before_are_not_removed(system, commands):
    """Another Kubernetes on this machine: its chains were there before and are left out."""
    system.remove_chains([("iptables", "filter", "KUBE-FIREWALL")])
    (script,) = [text for words, text in commands if words[0] == "iptables-restore"]
    assert "KUBE-SERVICES" not in script.replace("-D KUBE-SERVICES -g KUBE-FIREWALL", "")
    assert "MINE" not in script


def test_cgroups_go_deepest_first(system, tmp_path: Path):
    """rmdir refuses a folder that is not empty, like the kernel refuses a cgroup with children."""
    group = tmp_path / "tandem-kube"
    (group / "kubepods" / "pod1").mkdir(parents=True)
    (group / "kubepods" / "pod2").mkdir()
    system.remove_cgroup(group)
    assert not group.exists()
    system.remove_cgroup(group)


def test_settings_of_pip_name_their_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(TOOLS))
    import pip_settings

    (tmp_path / "index" / "simple").mkdir(parents=True)
    value = f"https://pypi.org/simple file://{tmp_path}/index/simple {tmp_path} {tmp_path}/missing"
    assert pip_settings.local_paths(value) == [str(tmp_path / "index"), str(tmp_path)]
