"""Objects of torch's operators, made before threads use them."""

import torch


def resolve_operators() -> None:
    """Make torch's Python objects of all operators now, in one thread.

    torch makes an operator's object at its first use and keeps a pointer to it in C++ without a reference. Two threads
    that use an operator for the first time at once each make one: the second object replaces the first, which is freed,
    and a dispatch mode is then called with freed memory (seen with torch 2.13: a segmentation fault).
    """
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
