"""When a run proves that FP8 runs as configured, and what follows from it.

The first step of every start is proven, so that nothing is trained on another plan. A fault may come later: so the
10th, 100th and 1,000th step of a start are proven, too, and every `logging.fp8_proof_interval`-th of the run. What
arithmetic excludes ends the run (`logging.fp8_proof=stop`), after a checkpoint if there are steps to lose; what is
unusual is a warning (`fp8/comparisons.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from gpt_pretrain.config.choices import Fp8ProofMode
from gpt_pretrain.data.batches import BatchIterator
from gpt_pretrain.fp8.proof import Proof, ProofError
from gpt_pretrain.megatron.optimizer import StepResult
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.report.records import Fp8CoverageRecord, Record
from gpt_pretrain.training.meter import Meter
from gpt_pretrain.training.watchdog import Watchdog
from gpt_pretrain.training.watches import find_first_scales

# Steps of a start that are proven beside the first: a layer that leaves FP8 after it shows within ten.
_EARLY = (10, 100, 1000)


class Proofs:
    """Finds the first FP8 scales, and proves steps; idle without FP8.

    `number` counts the proofs of the run so far; `saved` has the digests of the FP8 state in the checkpoint that the
    run resumes from (`fp8.delayed.state_digests`), None without one.
    """

    def __init__(
        self,
        trainable: Trainable,
        *,
        number: int,
        saved: Mapping[str, str] | None,
        log: Callable[[Record], None],
        watchdog: Watchdog,
        meter: Meter,
    ) -> None:
        self.number = number
        self.problem: ProofError | None = None
        """Why the run must end; None while all is well."""
        self._trainable = trainable
        self._saved = saved
        self._log = log
        self._watchdog = watchdog
        self._meter = meter
        spec = trainable.model.spec
        self._mode = spec.config.logging.fp8_proof
        # A replayed graph reports no products.
        self._interval = None if spec.kernels.cuda_graph_impl else spec.config.logging.fp8_proof_interval
        self._is_on = spec.fp8 is not None and self._mode is not Fp8ProofMode.never
        self._is_due = self._is_on
        self._proof: Proof | None = None
        self._num_steps = 0
        self._scale_passes = 0

    @property
    def has_more_to_lose(self) -> bool:
        """Whether steps were trained since the start, beside the one that was proven last."""
        return self._num_steps > 1

    def find_scales(self, iterators: Sequence[BatchIterator | None], num_samples: int, sequence_length: int) -> None:
        """With delayed scaling, finds scales unless a checkpoint had them; iterators stay at the first batch.

        That batch has so many samples, cut into pieces of so many tokens.
        """
        spec = self._trainable.model.spec
        if spec.fp8 is None or not spec.fp8.recipe.keeps_history:
            return
        # The watch of experts would count these passes, but experts are refused with delayed scaling.
        with self._watchdog.busy("finding the first scales of FP8"), self._meter.paused():
            self._scale_passes = find_first_scales(self._trainable, iterators, num_samples, sequence_length)

    def restored(self, saved: Mapping[str, str] | None) -> None:
        """A checkpoint was loaded: the next step is proven."""
        self._saved, self._is_due = saved, self._is_on

    def watching(self, step: int, num_samples: int) -> AbstractContextManager[None]:
        """Encloses a training step of so many samples, and watches it if its proof is due; `judge` follows."""
        self._num_steps += 1
        if self._interval is not None and (self._num_steps in _EARLY or step % self._interval == 0):
            self._is_due = self._is_on
        if not self._is_due:
            return nullcontext()
        # Only the first step after a load starts with the loaded state, even if that step is skipped.
        saved, self._saved = self._saved, None
        model = self._trainable.model
        num_microbatches = model.spec.microbatches_of(num_samples)
        self._proof = Proof(model, self._trainable.optimizer, self.number, saved, num_microbatches)
        return self._proof.watching()

    def judge(self, step: int, result: StepResult) -> None:
        """Judges the step that `watching` has watched; sets `problem` if the run must end."""
        proof, self._proof = self._proof, None
        if proof is None:
            return
        with self._meter.paused():
            # A skipped step leaves neither new weights nor new scales; the next one is proven instead.
            if not result.skipped:
                self._judge(proof, step)

    def _judge(self, proof: Proof, step: int) -> None:
        self._is_due = False
        self.number += 1
        try:
            proven = proof.judge()
        except ProofError as error:
            error.step = step
            if self._mode is Fp8ProofMode.stop:
                self.problem = error
                return
            # Nothing is proven.
            shares, warnings, time_s = (0.0, 0.0), error.rows, 0.0
            kept_out = tuple(each.module for each in self._trainable.model.spec.kept_out)
        else:
            shares = proven.fp8_flops_share, proven.fp8_parameter_bytes_share
            warnings, time_s, kept_out = proven.warnings, proven.time_s, proven.kept_out
        flops_share, bytes_share = shares
        self._log(
            Fp8CoverageRecord(
                step=step,
                gemm_flops_share=flops_share,
                parameter_bytes_share=bytes_share,
                time_s=time_s,
                first_scale_passes=self._scale_passes,
                layers_kept_out=kept_out,
                proof=self.number,
                microbatch=proof.turn.microbatch,
                part=proof.turn.part,
                warnings=warnings,
            )
        )
