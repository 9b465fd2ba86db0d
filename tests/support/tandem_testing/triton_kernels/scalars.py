"""Scalars as bounds of loops in Triton's interpreter, for Triton 3.6 beside numpy 2.4 and later.

The interpreter holds a scalar as an array of one number, which newer versions of numpy do not take for an integer.
Later versions of Triton take the number out of it, as this does for the process it is installed in.
"""

from triton.runtime import interpreter


def install() -> None:
    """Let scalars of the interpreter be integers where Python wants one."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched
