"""Exchanges of tensor parallelism behind their products: losses as without, validations and text included."""

import pytest

from tests.runs import SMALL_GPU_RUN, run_small

RUN = (*SMALL_GPU_RUN, "parallelism=tp2_sp", "model.optim.lr=3e-4", "trainer.limit_val_batches=1")


@pytest.mark.gpu(count=2, peer_access=True)
@pytest.mark.parametrize("fp8", ["none", "tensorwise", "delayed", "delayed with FP8 weights"])
def test_overlapped_exchanges_train_as_plain_ones_do(fp8, tmp_path, cache_dir):
    recipe, _, with_weights = fp8.partition(" ")
    overrides = [*RUN, f"fp8={recipe}", "sample.max_new_tokens=4"]
    if with_weights:
        overrides += ["model.fp8_params=true", "model.activation_cast_fusion=true"]
    plain, overlapped = (
        run_small(2, tmp_path / name, cache_dir, [*overrides, f"model.tp_comm_overlap={name}"], on_gpus=True)
        for name in ("false", "true")
    )
    for kind in ("train", "validation"):
        losses, expected = ([record.loss for record in getattr(metrics, kind)] for metrics in (overlapped, plain))
        assert losses == pytest.approx(expected, rel=5e-3)
