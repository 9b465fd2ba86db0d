"""Tokens that the device has sampled and the host has not seen.

    step N     publish: table[row] = sampled token             forward thread, right after sampling
    step N+1   was planned before: its input ids are RESOLVE
               resolve: RESOLVE ids are read from table[row]   forward thread, before the model runs

Steps run in launch order on one thread or stream, so a row needs space for one token only. A recycled row is published
again before it is resolved; row 0 is padding.

`int64_view` gives numpy arrays of host tensors without a new Python reference to them. A step begins with a little work
on the arrays of its batch and keeps the interpreter lock through it, because the scheduler thread waits for the lock
with the results of the step before. If the lock were released before the layers compute, the scheduler would run first
and the step wait, where both could run at once. torch releases it whenever a tensor's Python object is freed, and
`Tensor.numpy` makes one for the array to hold.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem_engine.forward.batch import RESOLVE, ForwardBatch
from tandem_engine.kernels.interface import by_triton


def int64_view(tensor: Tensor) -> npt.NDArray[Any]:
    """The int64 numbers of a dense host tensor. The caller keeps the tensor as long as the array."""
    assert tensor.dtype is torch.int64, f"{tensor.dtype} is not int64"
    assert tensor.is_contiguous(), f"strides of {tensor.stride()}"
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else bytearray()
    return np.ndarray(tuple(tensor.shape), np.int64, buffer=memory)


_CONSUMED = -1


class FutureMap:
    """The last sampled token of each `req_pool_idx`.

    Args:
        max_rows: rows besides padding; the largest usable `req_pool_idx`.
        debug: poison what was read, and assert that nothing is read twice or before it was published.
            Costs a device sync per step.
        queued: compute by operations of torch alone, as on any device but a CPU.
    """

    def __init__(
        self, max_rows: int, *, device: torch.device | str = "cpu", debug: bool = False, queued: bool = False
    ) -> None:
        self._tokens = torch.full((max_rows + 1,), _CONSUMED, dtype=torch.int64, device=device)
        on_host = self._tokens.device.type == "cpu" and not queued
        self._on_host = self._tokens.numpy() if on_host else None
        """The same memory."""
        self._debug = debug

    def resolve(self, input_ids: Tensor, token_rows: Tensor) -> Tensor:
        """Input ids [T] with every RESOLVE replaced by the token of its row; `token_rows` is [T]."""
        resolved = self._resolve_on_host(input_ids, token_rows)
        if resolved is None:
            resolved = self._resolve_on_device(input_ids, token_rows)
        if self._debug:
            self._consume(token_rows[input_ids == RESOLVE])
        return resolved

    def publish(self, rows: Tensor, token_ids: Tensor) -> None:
        """Remember the sampled `token_ids` [S] of `rows` [S]."""
        if self._on_host is not None:
            self._on_host[rows.numpy()] = token_ids.numpy()
        elif by_triton(self._tokens.device):
            from tandem_engine.kernels.triton.row_tables import publish_tokens

            publish_tokens(self._tokens, rows, token_ids)
        else:
            self._tokens[rows] = token_ids

    def _resolve_on_host(self, input_ids: Tensor, token_rows: Tensor) -> Tensor | None:
        """By numpy: operations of torch release the interpreter lock, see `int64_view`."""
        if self._on_host is None:
            return None
        ids = int64_view(input_ids)
        return torch.from_numpy(np.where(ids == RESOLVE, self._on_host[int64_view(token_rows)], ids))

    def _resolve_on_device(self, input_ids: Tensor, token_rows: Tensor) -> Tensor:
        if by_triton(self._tokens.device):
            from tandem_engine.kernels.triton.row_tables import resolve_tokens

            return resolve_tokens(self._tokens, input_ids, token_rows)
        return torch.where(input_ids == RESOLVE, self._tokens[token_rows], input_ids)

    def _consume(self, rows: Tensor) -> None:
        missing = rows[self._tokens[rows] == _CONSUMED].tolist()
        assert not missing, f"rows {missing} have no token to resolve: consumed already, or never published"
        assert len(set(rows.tolist())) == len(rows), f"a row is resolved twice in one step: {rows.tolist()}"
        self._tokens[rows] = _CONSUMED


def token_rows(batch: ForwardBatch) -> Tensor:
    """[T] the row of each token."""
    if batch.num_extend == 0:
        return batch.rows
    return batch.rows.repeat_interleave(batch.extend_lens, output_size=batch.num_tokens)
