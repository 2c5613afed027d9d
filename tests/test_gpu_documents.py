"""Documents of one sample do not see each other on GPUs: Transformer Engine's and local layers, alone and on two."""

import warnings
from dataclasses import replace
from inspect import unwrap
from itertools import accumulate

import pytest
import torch

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.patches import UNFILLED_GRADIENTS, patched
from gpt_pretrain.megatron import layers
from gpt_pretrain.training.step import compute_gradients
from tests.document_training import (
    GPU_MODELS,
    LENGTHS,
    assert_only_the_changed_one_differs,
    batches_of,
    borders,
    compute_logits,
    config_of,
    look,
    one_process,
    tokens_and_positions,
    train_and_look,
)
from tests.emulated_training import build_training_of
from tests.launching import gpu_environment, run_ranks
from tests.runs import SMALL_GPU_RUN, run_small
from tests.test_documents_attention import BORDERS, inputs, softmax_by_hand

__all__ = ["inputs"]

pytestmark = pytest.mark.gpu

TWO = (
    "te_bf16.cp2",
    "te_learned.cp2",
    "te_delayed.cp2",
    "te_stored.cp2",
    "te_blockwise.cp2",
    "te_tensorwise.cp2",
    "te_experts.cp2",
    "te_bf16.tp2_sp",
    "te_delayed.tp2_sp",
    "te_stored.tp2_sp",
    "te_delayed.pp2",
    "te_experts.ep2",
)


def needs_flash(case):
    if "flash" in case and "flash_attention" not in detect_platform().libraries:
        pytest.skip("flash-attn-4 is not installed")


# All documents share one scale, so that a change in one rounds the others in another way.
ONE_SCALE = "te_tensorwise"


@pytest.mark.parametrize("case", [case for case in GPU_MODELS if case != ONE_SCALE])
def test_a_changed_document_changes_no_bit_of_another(case):
    needs_flash(case)
    config = config_of(case)
    with one_process(config):
        seen = train_and_look(config)
    assert_only_the_changed_one_differs(seen, config)
    assert seen["losses"][1] < seen["losses"][0]


@pytest.mark.parametrize("case", ["te_bf16", "te_learned", "te_flash", "local"])
def test_documents_of_a_batch_equal_the_same_documents_alone(case):
    """Without the code for documents: each goes through the model as a sequence of its own."""
    needs_flash(case)
    config = config_of(case)
    with one_process(config):
        training = build_training_of(config)
        (chunk,) = training.chunks
        chunk.eval()
        tokens, positions = tokens_and_positions(config)
        with torch.no_grad():
            together = compute_logits(training, tokens, positions)
        for begin, end in borders(config):
            of_document = tokens.view(1, -1)[:, begin:end]
            with torch.no_grad():
                alone = chunk(of_document, positions.view(1, -1)[:, begin:end], None)[0].float().cpu()
            # BF16 rounds by up to 2⁻⁹ each time, over two layers.
            scale = alone.abs().max()
            assert (together[begin:end] - alone).abs().max() < 0.05 * scale


@pytest.mark.parametrize("case", ["te_bf16", "te_flash"])
def test_layers_train_as_local_ones_do(case):
    needs_flash(case)
    seen = {}
    for each in (case, "local"):
        config = config_of(each)
        with one_process(config):
            seen[each] = train_and_look(config)
    assert seen[case]["losses"] == pytest.approx(seen["local"]["losses"], rel=1e-2)
    assert seen[case]["norms"] == pytest.approx(seen["local"]["norms"], rel=5e-2)


def test_packed_documents_in_local_layers_are_a_softmax_by_hand(inputs):
    borders = inputs["borders"].cuda()
    leaves = [inputs[name].cuda().bfloat16().requires_grad_() for name in ("query", "key", "value")]
    out = layers.attention_in_documents(*leaves, 0.25, borders=borders, longest=BORDERS[-1])
    gradient = inputs["gradient"].cuda()
    out.backward(gradient.bfloat16())
    exact = [each.detach().cpu().requires_grad_() for each in leaves]
    expected = softmax_by_hand(*exact, 0.25)
    expected.backward(inputs["gradient"].double())
    torch.testing.assert_close(out.cpu().double(), expected.detach(), rtol=2e-2, atol=2e-2)
    for leaf, each in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.cpu(), each.grad, rtol=5e-2, atol=5e-2)


def test_gradients_are_the_same_where_they_are_not_filled_first():
    """Memory that another tensor has left full of NaN is written in every row, also beside empty documents."""
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    from gpt_pretrain.megatron.documents import _te_attention

    _te_attention()
    ours = backends.fused_attn_bwd
    theirs = unwrap(ours)
    assert theirs is not ours
    generator = torch.Generator("cuda").manual_seed(1)
    lengths = [1, 300, 127, 128, 1, 467, 1024, 0, 0]
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    given = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    projected = torch.randn(2048, 12, 3, 64, **given)
    gradient = torch.randn(2048, 12 * 64, **given)
    attention = DotProductAttention(12, 64, qkv_format="thd", attn_mask_type="padding_causal").cuda()
    bounds = {f"cu_seqlens_{each}": borders for each in ("q", "kv")} | {"max_seqlen_q": 1024, "max_seqlen_kv": 1024}
    found = {}
    for name, backward in (("theirs", theirs), ("ours", ours)):
        leaf = projected.clone().requires_grad_()
        with patched(UNFILLED_GRADIENTS, fused_attn_bwd=backward):
            out = attention(*leaf.unbind(2), pad_between_seqs=False, **bounds)
            spoilt = [torch.full_like(projected, torch.nan) for _ in range(4)]
            del spoilt
            out.backward(gradient)
        found[name] = leaf.grad
    assert found["ours"].isfinite().all()
    # cuDNN adds up a query's gradient in any order.
    torch.testing.assert_close(found["ours"], found["theirs"], rtol=2e-2, atol=2e-2)


def waits(config):
    """How often the host waits for the GPU in a step's forward and backward passes."""
    with one_process(config):
        training = build_training_of(config)
        tokens, positions = tokens_and_positions(config)

        def passes():
            return [list(batches_of(config, tokens, positions))]

        for _ in range(2):
            compute_gradients(training.trainable, [iter(each) for each in passes()])
        prepared = [iter(each) for each in passes()]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                compute_gradients(training.trainable, prepared)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(each.message) for each in caught if "synchroniz" in str(each.message)]


@pytest.mark.parametrize("case", ["te_bf16", "te_delayed", "te_flash", "local"])
def test_the_host_does_not_wait_for_borders(case):
    needs_flash(case)
    masked = config_of(case)
    data = replace(masked.model.data, inter_document_masking=False)
    without = waits(replace(masked, model=replace(masked.model, data=data)))
    assert len(waits(masked)) <= len(without), (waits(masked), without)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    program = ["tests/programs/document_layouts.py", str(folder), *TWO]
    done = run_ranks(2, program, env=gpu_environment(2), timeout_s=480)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("case", TWO)
def test_two_gpus_keep_documents_apart_and_train_as_one_does(case, launched):
    config = config_of(case.partition(".")[0])
    with one_process(config):
        alone = train_and_look(config)
    ranks = [torch.load(launched / f"{case}.{rank}.pt") for rank in range(2)]
    for seen in ranks:
        assert seen["squared_lengths"] == 2 * sum(length**2 for sample in LENGTHS[128] for length in sample)
        assert seen["losses"] == pytest.approx(alone["losses"], rel=2e-2)
    with_logits = [seen for seen in ranks if seen["logits"] is not None]
    assert with_logits
    for seen in with_logits if ONE_SCALE not in case else ():
        assert_only_the_changed_one_differs(seen, config)


STAGES = 'model.data.stages=["4096 seq_length=32 sources=1","sources=1"]'


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("masked", ["false", "true"])
@pytest.mark.parametrize("layout", ["cp2", "tp2_sp", "pp2"])
def test_a_stage_of_short_sequences_trains_on_two_gpus_as_on_one(layout, masked, tmp_path, cache_dir):
    """Four steps in pieces of 32 tokens, then four whole ones; each step is proven."""
    overrides = [*SMALL_GPU_RUN, STAGES, "fp8=delayed", "logging.fp8_proof_interval=1", "trainer.max_steps=8"]
    masking = [f"model.data.inter_document_masking={masked}", "model.num_query_groups=2"]
    one = run_small(1, tmp_path / "one", cache_dir, [*overrides, *masking], on_gpus=True)
    split = [*overrides, *masking, f"parallelism={layout}"]
    two = run_small(2, tmp_path / "two", cache_dir, split, on_gpus=True)
    assert [each.loss for each in two.train] == pytest.approx([each.loss for each in one.train], rel=2e-2)
    for metrics in (one, two):
        assert [proof.warnings for proof in metrics.fp8_proofs] == [()] * 8


def test_the_check_finds_documents_that_see_each_other(monkeypatch):
    """Borders that join two documents."""
    config = config_of("te_bf16")

    def joined(spec, attention, real=layers.document_attention):
        built = real(spec, attention)
        forward = built.func.forward

        def see_more(self, *inputs, **others):
            *parts, inside = inputs
            return forward(self, *parts, torch.cat([inside[:4], inside[5:]]), **others)

        monkeypatch.setattr(built.func, "forward", see_more)
        return built

    monkeypatch.setattr(layers, "document_attention", joined)
    with one_process(config):
        seen = look(build_training_of(config))
    with pytest.raises(AssertionError):
        assert_only_the_changed_one_differs(seen, config)
