"""Triton's language stays as its interpreter needs it, for a process that interprets kernels and does nothing else.

The interpreter replaces every function of the language when a kernel is launched, and again at each call of a function
within a kernel: it looks at a thousand members each time, which takes longer than what is called. Most of what remains
is no arithmetic either, and is the same for every program:

    calls        each function of the language is called by way of two others, which look at its arguments
    overflow     each sum of integers is computed again in 64 bits and compared with two bounds, for an assertion that
                 the interpreter makes only when it debugs
    types        each intermediate result has a type, whose name, shape and numpy dtype are worked out again
    shapes       operands are made to have one shape, which most of them have already

What is left out here changes no result and no error: a type is remembered only after Triton has checked it, by all
that Triton makes it of, and operands are taken as they are only where Triton would give the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
from triton import language
from triton.runtime import interpreter

OF_TENSORS = {"handle", "type", "dtype", "shape", "numel"}
"""What Triton's tensors have; another version may give them more."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """As much of a type of blocks as the interpreter fills a block by."""

    shape: tuple[int, ...]


class Kept:
    """In place of the interpreter's record of what it has to put back."""

    def restore(self) -> None:
        pass


def install() -> None:
    """Keep the language and what is known of types, and leave out assertions that nothing makes."""
    _keep_functions()
    _call_at_once()
    options = interpreter.interpreter_builder.options
    assert not options.debug, "then overflow is asserted"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    _remember_numpy_types()
    _remember_blocks(language.core.block_type)
    _remember_shapes(language.core.tensor)
    _skip_equal_shapes(interpreter.TritonSemantic, language.core.tensor)


def _keep_functions() -> None:
    """Replace functions of the language once, for each set of modules by which kernels know it."""
    patch = interpreter._patch_lang
    known: set[frozenset[int]] = set()
    patched_for: set[Callable[..., Any]] = set()

    def patched(fn: Callable[..., Any]) -> Kept:
        if fn not in patched_for:
            seen = frozenset(id(one) for one in fn.__globals__.values() if one is language or one is language.core)
            if seen not in known:
                patch(fn)
                known.add(seen)
            patched_for.add(fn)
        return Kept()

    interpreter._patch_lang = patched


def _call_at_once() -> None:
    """A function of the language gets the interpreter's semantics, whatever the caller gives it in their place."""
    semantic, checking = interpreter.interpreter_semantic, language.core.builtin(lambda: None).__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        assert builder is semantic.builder, "one interpreter serves all"
        # The check that its caller gives some: they are given here.
        function = member.__wrapped__ if getattr(member, "__code__", None) is checking else member

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch_attr


def _remember_numpy_types() -> None:
    """By the name of a type, which tells pointers, blocks and numbers apart. The interpreter makes a table of all."""
    find, known = interpreter._get_np_dtype, {}

    def found(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = find(kind)
        return known[kind.name]

    interpreter._get_np_dtype = found


def _remember_blocks(block: Any) -> None:
    """Size and name of types of blocks, by the type of their numbers and their shape.

    Types of numbers are distinguished by identity: a name says nothing of the memory that a pointer points to. There
    are a few of them, and an object that is remembered is not freed, so no other gets its id.
    """
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    init = block.__init__

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        # A size that is no integer is an error, though it may equal one.
        key = (id(element_ty), sizes, *map(type, sizes))
        facts = known.get(key)
        if facts is None:
            init(self, element_ty, shape)
            # A tuple of Python; `shape` is one of Triton in some versions, which takes long to compare.
            self.sizes, self.filled = sizes, Shaped(sizes)
            known[key] = dict(vars(self))
        else:
            self.__dict__.update(facts)

    block.__init__ = remembered


def _remember_shapes(tensor: Any) -> None:
    """Sizes of a tensor as constants of the language, by its shape."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}
    init = tensor.__init__

    def remembered(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - its name in Triton
        sizes = type.sizes if type.is_block() else ()
        if sizes not in known:
            init(self, handle, type)
            assert vars(self).keys() == OF_TENSORS, f"tensors of this Triton have {sorted(vars(self))}"
            known[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[sizes]

    tensor.__init__ = remembered


def _skip_equal_shapes(semantic: Any, tensor: Any) -> None:
    """Two scalars, or two blocks of one shape whose numbers have it too, are broadcast already. A scalar fills a block
    without a type being worked out."""
    broadcast = semantic.broadcast_impl_value

    def filled(self: Any, scalar: Any, block: Any) -> Any:
        kind = block.with_element_ty(scalar.type.scalar)
        return tensor(self.builder.create_splat(kind.filled, scalar.handle), kind)

    def checked(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if not one.is_block():
            return (filled(self, lhs, other), rhs) if other.is_block() else (lhs, rhs)
        if not other.is_block():
            return lhs, filled(self, rhs, one)
        if lhs.handle.data.shape == one.sizes == other.sizes == rhs.handle.data.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = checked


@triton.jit
def sums_kernel(numbers, out):
    """Sums of the complements of 16 numbers, and of them and themselves."""
    these = language.load(numbers + language.arange(0, 16))
    language.store(out, language.sum(~these, axis=0))
    language.store(out + 1, language.sum(these + these, axis=0))


@triton.jit
def unequal_kernel(numbers, out):
    """Adds 16 numbers to 32."""
    these, others = (language.load(numbers + language.arange(0, size)) for size in (16, 32))
    language.store(out, language.sum(these + others, axis=0))


def check_what_is_remembered_hides_no_error(device: str) -> None:
    """Sizes that equal known ones and are no integers, operands of two shapes; and a constant whose type is a block's,
    but is held as a single number."""
    block, pointer = language.block_type, language.pointer_type
    assert tuple(block(language.int32, [16]).shape) == (16,)
    for size, error in ((16.0, TypeError), (24, ValueError)):
        for _ in range(2):
            with pytest.raises(error):
                block(language.int32, [size])
    spaces = [block(pointer(language.int32, space), [16]).element_ty.address_space for space in (1, 3, 1)]
    assert spaces == [1, 3, 1], "types of one name are not one type"
    numbers, out = torch.arange(32, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    sums_kernel[(1,)](numbers, out)
    assert out.tolist() == [-(120 + 16), 2 * 120]
    for _ in range(2):
        with pytest.raises(Exception, match="incompatible dimensions"):
            unequal_kernel[(1,)](numbers, out)
