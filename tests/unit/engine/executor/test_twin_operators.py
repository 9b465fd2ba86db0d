"""Operators are resolved before several threads can use one for the first time."""

import torch

from tandem_testing.twin_ranks import NAMESPACE


def test_operators_are_resolved_at_import():
    unresolved = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        packet = vars(getattr(torch.ops, namespace)).get(name)
        if packet is None or (overload or "default") not in vars(packet):
            unresolved.append(qualified)
    assert unresolved == []
    assert f"{NAMESPACE}::all_reduce" in torch._C._dispatch_get_all_op_names()
