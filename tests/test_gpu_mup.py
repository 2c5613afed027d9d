"""muP on GPUs: its factors reach Transformer Engine's attention, the fused loss, FP8 weights and all layouts."""

import pytest

from gpt_pretrain.coordinate_check import main
from tests.runs import SMALL_GPU_RUN, run_small, small_corpus
from tests.test_gpu_resume import DISTRIBUTED, check_resume

pytestmark = pytest.mark.gpu

STEPS, CUT = 20, 10
MUP = (
    *SMALL_GPU_RUN,
    *("model.use_mup=true", "model.mup_base_hidden_size=64", "model.mup_embedding_mult=3"),
    "checkpoint.save_at_end=true",
    "trainer.deterministic=true",
    f"model.optim.sched.decay_steps={STEPS}",
)
PLAIN = ("model.transformer_engine=false", "model.cross_entropy_loss_fusion=false")
SMALL_STATES = (DISTRIBUTED, "model.optim.use_precision_aware_optimizer=true")


@pytest.mark.parametrize(
    "overrides",
    [(), SMALL_STATES, ("fp8=delayed", "model.fp8_params=true", DISTRIBUTED), ("fp8=tensorwise", *SMALL_STATES)],
    ids=["bf16", "small states", "delayed weights", "tensorwise, small states"],
)
def test_it_trains_as_plain_layers_do_and_resumes_bit_for_bit(overrides, tmp_path, cache_dir):
    uncut = check_resume(tmp_path, cache_dir, [*MUP, *overrides], cut=CUT, end=STEPS)
    plain = run_small(1, tmp_path / "plain", cache_dir, [*MUP, *PLAIN, f"trainer.max_steps={STEPS}"], on_gpus=True)
    assert bool(uncut.fp8_proofs) is any(each.startswith("fp8=") for each in overrides)
    for record, expected in zip(uncut.train, plain.train, strict=True):
        assert record.hidden_lr == pytest.approx(record.lr / 4)
        assert record.loss == pytest.approx(expected.loss, rel=0.02)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("layout", ["dp", "zero2", "fsdp", "tp2_sp", "pp2"])
def test_two_gpus_train_as_one(layout, tmp_path, cache_dir):
    overrides = [*MUP, "fp8=delayed", "model.fp8_params=true", f"trainer.max_steps={STEPS}"]
    one = run_small(1, tmp_path / "one", cache_dir, [*overrides, DISTRIBUTED], on_gpus=True)
    two = run_small(2, tmp_path / "two", cache_dir, [*overrides, f"parallelism={layout}"], on_gpus=True)
    assert two.train[-1].loss == pytest.approx(one.train[-1].loss, rel=0.02)
    assert two.train[-1].hidden_lr == one.train[-1].hidden_lr


@pytest.mark.parametrize(
    ("overrides", "code"), [(("model.use_mup=true", "model.mup_base_hidden_size=256"), 0), ((), 4)]
)
def test_sizes_do_not_depend_on_the_width(overrides, code, tmp_path, cache_dir):
    widths = "coordinate_check.widths=[256,512,1024]"
    assert main([widths, "data=text", *small_corpus(cache_dir), *overrides, f"run_dir={tmp_path}"]) == code
