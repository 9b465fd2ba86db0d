"""What a node changes in the machine, and how that is undone: bridges, forwarding, iptables chains, cgroups, mounts.

prepare ─▶ the node runs ─▶ restore     what was there before is written down first, so that `restore` also works
                                        after a crash, and twice
"""

from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

NODE_IP = "10.245.0.1"
"""On a bridge of our own: API server, kubelet and DNS listen there."""
POD_CIDR = "10.244.0.0/24"
NODE_BRIDGE, POD_BRIDGE = "tandem-node", "tandem-pods"
"""The second is made by the CNI plugin, and is the name of its network."""
CGROUP = "tandem-kube"

CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = "cpu cpuacct cpuset memory devices freezer blkio pids systemd unified hugetlb net_cls perf_event".split()
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
CNI_RESULTS = Path("/var/lib/cni/results")
OUR_CHAINS = ("KUBE-", "CNI-HOSTPORT-", "CNI-DN-")
TABLES = ("nat", "filter", "mangle")

Chain = tuple[str, str, str]
"""Command (iptables or ip6tables), table, name."""


def run(*command: object, check: bool = True, text: str | None = None) -> str:
    """Output of a command. Raises `CalledProcessError` unless `check` is False."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=check, input=text, capture_output=True, text=True).stdout


class System:
    """The machine, as far as a node changes it. `state` holds what has to be put back."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._forward_before = state / "ip_forward.before"
        self._chains_before = state / "chains.before"

    def prepare(self) -> None:
        """Write down how things are, then make what kubelet and kube-proxy expect to find."""
        if not self._forward_before.exists():
            self._chains_before.write_text("".join(" ".join(chain) + "\n" for chain in service_chains()))
            self._forward_before.write_text(FORWARD.read_text())
        FORWARD.write_text("1")
        if not Path("/sys/class/net", NODE_BRIDGE).exists():
            run("ip", "link", "add", NODE_BRIDGE, "type", "bridge")
            run("ip", "address", "add", f"{NODE_IP}/32", "dev", NODE_BRIDGE)
            run("ip", "link", "set", NODE_BRIDGE, "up")
        for controller in CONTROLLERS:
            if (CGROUPS / controller).is_dir():
                (CGROUPS / controller / CGROUP).mkdir(exist_ok=True)
        # A cpuset begins empty, and then nothing can be put into it.
        if (CGROUPS / "cpuset" / CGROUP).is_dir():
            for file in ("cpuset.cpus", "cpuset.mems"):
                (CGROUPS / "cpuset" / CGROUP / file).write_text((CGROUPS / "cpuset" / file).read_text())

    def restore(self, *mounted: Path) -> None:
        """Everything as it was. `mounted`: folders below which nothing may stay mounted."""
        for folder in mounted:
            unmount_below(folder)
        for bridge in (POD_BRIDGE, NODE_BRIDGE):
            run("ip", "link", "delete", bridge, check=False)
        shutil.rmtree(self.state / "ipam", ignore_errors=True)
        for result in CNI_RESULTS.glob(f"{POD_BRIDGE}-*"):
            result.unlink()
        if self._forward_before.exists():
            before = {tuple(line.split()) for line in self._chains_before.read_text().splitlines()}
            remove_chains([chain for chain in service_chains() if chain not in before])
            FORWARD.write_text(self._forward_before.read_text())
            self._forward_before.unlink()
            self._chains_before.unlink()
        for controller in CONTROLLERS:
            remove_cgroup(CGROUPS / controller / CGROUP)


def service_chains() -> list[Chain]:
    """The chains that kubelet, kube-proxy and the port mapping plugin make, where there are any."""
    found = []
    for command in ("iptables", "ip6tables"):
        for table in TABLES:
            for line in run(f"{command}-save", "-t", table, check=False).splitlines():
                name = line.removeprefix(":").split(" ")[0]
                if line.startswith(":") and name.startswith(OUR_CHAINS):
                    found.append((command, table, name))
    return found


def remove_chains(chains: list[Chain]) -> None:
    """After the rules that jump to them. In one transaction per table: a chain may be referred to by another."""
    for command in ("iptables", "ip6tables"):
        for table in TABLES:
            names = [name for one, where, name in chains if (one, where) == (command, table)]
            if not names:
                continue
            rules = run(f"{command}-save", "-t", table).splitlines()
            jumps = [rule for rule in rules if rule.startswith("-A ") and _target(rule) in names]
            script = [f"*{table}", *(rule.replace("-A ", "-D ", 1) for rule in jumps)]
            script += [f"-F {name}" for name in names] + [f"-X {name}" for name in names]
            run(f"{command}-restore", "--noflush", text="\n".join([*script, "COMMIT", ""]))


def _target(rule: str) -> str:
    words = rule.split()
    return next((after for word, after in pairwise(words) if word in ("-j", "-g")), "")


def remove_cgroup(group: Path) -> None:
    """A cgroup and those below it, the deepest first."""
    if group.is_dir():
        for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        group.rmdir()


def unmount_below(folder: Path) -> None:
    """Several mounts may lie on one another: the last one first."""
    targets = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for target in reversed(targets):
        if Path(target) == folder or folder in Path(target).parents:
            run("umount", "--lazy", target, check=False)
