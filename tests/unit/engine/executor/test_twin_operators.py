"""Operators are resolved before several threads can use one for the first time."""

import os
import subprocess
import sys

from tandem_testing.simulated_ranks import NAMESPACE

UNRESOLVED = """
import sys
import torch
import tandem_testing.simulated_ranks

for qualified in torch._C._dispatch_get_all_op_names():
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    packet = vars(getattr(torch.ops, namespace)).get(name)
    if namespace in sys.argv and (packet is None or (overload or "default") not in vars(packet)):
        print(qualified)
"""


def test_operators_are_resolved_at_import():
    """In a process of its own: others may have registered operators since."""
    command = [sys.executable, "-c", UNRESOLVED, "aten", NAMESPACE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout == ""
