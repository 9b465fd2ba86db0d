"""From logits to tokens on a device, queued from start to end.

The order, the rules and the noise are those of `sampler`, and so are the tokens: what differs is that nothing is
decided by a look at the device's numbers [no-device-wait]. What `sampler` leaves out because no row asks for it is left
out here where the host says so, and computed for all rows where only the device could tell.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.forward.forward_batch import SampledLogprobs, SamplingBatch
from tandem_engine.forward.outcome import Outcome, nothing
from tandem_engine.forward.step_inputs import StepInputs
from tandem_engine.kernels.dispatch import by_triton
from tandem_engine.sampling.filters import queued_thresholds
from tandem_engine.sampling.noise import gumbel, token_hashes
from tandem_engine.sampling.queued_editor import QueuedEditor
from tandem_engine.sampling.queued_logprobs import queue_sampled
from tandem_engine.sampling.sampler import UNSOUND, scale


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedSample:
    """R rows in the order of the logits."""

    token_ids: Tensor
    """[R] int64; `UNSOUND` where the best logit is NaN or +infinity."""
    logprobs: Outcome[tuple[SampledLogprobs | None, ...]]
    """[R], or empty when nobody asked."""


class QueuedSampler:
    """Samples one token per row on a device."""

    def __init__(self) -> None:
        self._hashes = torch.empty(0, dtype=torch.int32)
        self.editor = QueuedEditor()

    def sample(self, logits: Tensor, inputs: StepInputs, masks: tuple[Tensor, Tensor] | None = None) -> QueuedSample:
        """logits [R, V] float32, left as they are. `inputs` on their device; `masks` as in `QueuedEditor.edit`."""
        sampling = inputs.sampling
        edited = self.editor.edit(logits, sampling.edits, inputs.suppressed, masks=masks, ahead=inputs.ahead)
        make = _choose_by_kernels if by_triton(logits.device) else self._choose
        token_ids = make(edited, sampling, filtered=inputs.filtered)
        logprobs: Outcome[tuple[SampledLogprobs | None, ...]] = nothing(())
        if sampling.logprobs:
            logprobs = queue_sampled(logits, token_ids.clamp(min=0), sampling.logprobs, sampling.logprob_ids)
        return QueuedSample(token_ids=token_ids, logprobs=logprobs)

    def record(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """See `LogitEditor.record`."""
        self.editor.record(inputs.recorded, token_ids)

    def _choose(self, logits: Tensor, sampling: SamplingBatch, *, filtered: bool) -> Tensor:
        best, token_ids = logits.max(dim=1)
        if not sampling.all_greedy:
            drawn = self._draw(logits, sampling, filtered=filtered)
            token_ids = torch.where(sampling.temperature > 0.0, drawn, token_ids)
        return token_ids.where(best < torch.inf, UNSOUND)

    def _draw(self, logits: Tensor, sampling: SamplingBatch, *, filtered: bool) -> Tensor:
        """[R] by the Gumbel-max rule over what the filters keep. What greedy rows get here means nothing."""
        scaled = scale(logits, sampling.temperature.where(sampling.temperature > 0.0, 1.0))
        if filtered:
            thresholds = queued_thresholds(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
            scaled = scaled.masked_fill(scaled < thresholds[:, None], -torch.inf)
        noise = gumbel(sampling.seed, sampling.position, self._vocabulary(logits))
        return (noise + scaled).argmax(dim=1)

    def _vocabulary(self, logits: Tensor) -> Tensor:
        if len(self._hashes) != logits.shape[1] or self._hashes.device != logits.device:
            self._hashes = token_hashes(torch.arange(logits.shape[1], device=logits.device))
        return self._hashes


def _choose_by_kernels(logits: Tensor, sampling: SamplingBatch, *, filtered: bool) -> Tensor:  # noqa: ARG001
    """The same by Triton, which needs no sort and tells rows with filters by itself."""
    from tandem_engine.sampling.on_device import sample_rows

    return sample_rows(logits, sampling)
