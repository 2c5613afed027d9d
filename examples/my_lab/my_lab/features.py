"""A feature: fp32 products in TF32; `model.features=[lab_tf32]` turns it on."""

from collections.abc import Iterator

from gpt_pretrain import extend
from gpt_pretrain.features.feature import FusedKernel, Lack, Obstacle, Resolved, RunSpec


@extend.feature("lab_tf32")
class Tf32(FusedKernel):
    """Ten bits of mantissa in products of fp32 tensors, which tensor cores then compute."""

    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        """Settings that exclude it, with the reasons."""
        if run.config.trainer.precision.name != "fp32":
            yield f"trainer.precision={run.config.trainer.precision.name}", "it is for products of fp32 tensors"

    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        """What it needs that this machine does not have, and why."""
        if not spec.platform.cuda:
            yield "a GPU", "there is no CUDA device"

    def prepare(self) -> None:
        """Called before the model is built."""
        import torch

        torch.backends.cuda.matmul.fp32_precision = "tf32"
