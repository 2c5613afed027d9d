"""QK clipping on GPUs: Transformer Engine's largest logits, FP8 weights that follow, resumes and layouts."""

import pytest
import torch

from gpt_pretrain.features.qk_clip import largest_logits
from gpt_pretrain.megatron.qk_clip import LargestLogits
from tests.runs import SMALL_GPU_RUN, run_small
from tests.te_training import te_training
from tests.test_gpu_resume import DISTRIBUTED, check_resume

pytestmark = pytest.mark.gpu

STEPS, CUT = 12, 6
CLIP = ("model.qk_clip=true", "model.qk_clip_threshold=0.05", "model.num_query_groups=2")
FP8_WEIGHTS = ("fp8=delayed", "model.fp8_params=true", DISTRIBUTED)
RUN = (
    *SMALL_GPU_RUN,
    *CLIP,
    "optimizer=muon",
    "checkpoint.save_at_end=true",
    "trainer.deterministic=true",
    f"model.optim.sched.decay_steps={STEPS}",
)
PRECISIONS = {
    "bf16": (),
    "delayed weights": FP8_WEIGHTS,
    "tensorwise weights": ("fp8=tensorwise", "model.fp8_params=true", DISTRIBUTED),
    "recomputed": ("model.activations_checkpoint_granularity=selective",),
}


@pytest.mark.parametrize("overrides", [(), ("model.num_query_groups=2",), ("model.bias=true",)], ids=str)
def test_the_largest_logits_are_those_of_queries_and_keys(overrides):
    with te_training("model.log_max_attention_logit=true", "model.init_method_std=0.2", *overrides) as training:
        attentions = [layer.self_attention.core_attention for layer in training.chunks[0].decoder.layers]
        seen = {attention: [] for attention in attentions}

        def keep(attention, inputs):
            query, key = (each.detach().double() for each in inputs[:2])
            seen[attention].append(largest_logits(query, key, query.size(-1) ** -0.5))

        for attention in attentions:
            attention.register_forward_pre_hook(keep)
        logits = LargestLogits(training.trainable.model)
        training.gradients()
        for attention in attentions:
            expected = torch.stack(seen[attention]).amax(0)
            torch.testing.assert_close(attention.current_max_attn_logits.float(), expected, rtol=1e-2, atol=0)
        assert logits.share() == max(attention.current_max_attn_logits.max() for attention in attentions)


def test_the_same_inputs_have_no_logit_above_the_threshold_after_a_clip():
    still = ("model.optim.lr=1e-12", "model.optim.weight_decay=0", "model.init_method_std=0.2")
    with te_training(*CLIP, *still, DISTRIBUTED) as training:
        attention = training.chunks[0].decoder.layers[0].self_attention
        before = training.result().max_attention_logit
        training.result()
        # The threshold over what the second step found: one, within BF16.
        assert before > 1
        torch.testing.assert_close(
            attention.qk_clip_balancing_eta, torch.ones_like(attention.qk_clip_balancing_eta), rtol=0.02, atol=0
        )


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_a_resume_is_bit_for_bit_and_fp8_is_proven(precision, tmp_path, cache_dir):
    uncut = check_resume(tmp_path, cache_dir, [*RUN, *precision], cut=CUT, end=STEPS)
    assert uncut.train[0].max_attention_logit > 0.05
    assert bool(uncut.fp8_proofs) is ("fp8" in "".join(precision))
    assert not any(proof.warnings for proof in uncut.fp8_proofs)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("layout", ["dp", "zero2", "fsdp", "tp2_sp", "pp2"])
def test_two_gpus_clip_as_one(layout, tmp_path, cache_dir):
    end = f"trainer.max_steps={STEPS}"
    one = run_small(1, tmp_path / "one", cache_dir, [*RUN, end], on_gpus=True)
    two = run_small(2, tmp_path / "two", cache_dir, [*RUN, end, f"parallelism={layout}"], on_gpus=True)
    assert two.train[-1].loss == pytest.approx(one.train[-1].loss, rel=0.02)
    assert two.train[0].max_attention_logit == pytest.approx(one.train[0].max_attention_logit, rel=0.02)


@pytest.mark.parametrize("precision", [(), FP8_WEIGHTS], ids=["bf16", "delayed weights"])
def test_a_clip_never_makes_the_host_wait(precision):
    """torch would raise where the host reads from the device."""
    with te_training(*CLIP, DISTRIBUTED, *precision) as training:
        training.step()
        logits = LargestLogits(training.trainable.model)
        training.gradients()
        (part,) = training.trainable.optimizer.chained_optimizers
        part.prepare_grads()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits.share()
            part.optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
