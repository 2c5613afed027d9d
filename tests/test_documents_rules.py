"""What does not go with documents that do not see each other, and is refused before a run starts."""

from dataclasses import replace

import pytest

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.megatron import documents, layers
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.rules.machine import check_machine
from gpt_pretrain.rules.no_effect import given_without_effect
from tests.platforms import CPU, H200, spec_of
from tests.refusals import Refused, broken_rules, check_refused, check_told

MASKED = "model.data.inter_document_masking=true"
SEQ_AUX = "model.moe_router_load_balancing_type=seq_aux_loss"
CP2 = "model.context_parallel_size=2 model.global_batch_size=16"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("fp8=delayed model.fp8_dot_product_attention=true", "model.fp8_dot_product_attention=true"),
        ("model.masked_softmax_fusion=true", "model.masked_softmax_fusion=true"),
        (f"model=moe_small {SEQ_AUX} model.micro_batch_size=2", SEQ_AUX),
        (
            f"{CP2} model.num_attention_heads=4 model.num_query_groups=1",
            "model.context_parallel_size=2 model.num_query_groups=1",
        ),
    ],
)
def test_masking_is_refused_beside_what_cannot_do_it(overrides, told):
    check_refused(Refused(f"{MASKED} {overrides}", told=f"{MASKED} {told}"))


@pytest.mark.parametrize("asked", ["model.cuda_graph_impl=local", "model.compile=true"])
def test_layers_of_one_shape_are_refused_beside_masking(asked):
    check_refused(Refused(f"{asked} {MASKED}", told=f"{asked} {MASKED}"))


@pytest.mark.parametrize(
    "overrides",
    [
        "model=moe_small model.moe_router_load_balancing_type=aux_loss model.micro_batch_size=2",
        f"model=moe_small {SEQ_AUX} model.micro_batch_size=1",
        f"{CP2} model.num_attention_heads=4 model.num_query_groups=2",
        "parallelism=tp2_sp_pp2 model.global_batch_size=16",
        "fp8=delayed model.fp8_params=true",
        "fp8=blockwise",
        "fp8=torchao_rowwise",
        "model.activations_checkpoint_granularity=selective",
        "model.use_flash_attention=true",
    ],
)
def test_masking_goes_with_the_rest(overrides):
    assert broken_rules([MASKED, *overrides.split()]) == []


def test_random_tokens_have_no_documents_to_mask():
    (message,) = given_without_effect(load_config(["data=mock", MASKED]), frozenset([MASKED.partition("=")[0]]))
    check_told(message, [MASKED, "model.data.data_impl=mock"])


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_a_gpu_that_would_write_all_scores_is_refused(capability):
    spec = spec_of(load_config([MASKED]), replace(H200, compute_capability=capability))
    with pytest.raises(ConfigError) as caught:
        check_machine(spec)
    (told,) = [problem for problem in caught.value.problems if problem.startswith(MASKED)]
    check_told(told, [MASKED])
    check_machine(spec_of(load_config([MASKED]), H200))


def test_null_chooses_no_graphs_and_no_attention_that_was_not_measured_with_masking():
    flash = replace(H200, libraries={"flash_attention": "4.0.0b36"})
    small, llama = ["model=gpt2_124m", "fp8=tensorwise"], ["model=llama3_8b"]
    assert spec_of(load_config(small), H200).kernels.cuda_graph_impl is not None
    assert spec_of(load_config([*small, MASKED]), H200).kernels.cuda_graph_impl is None
    for masked in (False, True):
        spec = spec_of(load_config([*llama, *([MASKED] if masked else [])]), flash)
        assert spec.kernels.features["use_flash_attention"] is not masked


def test_each_kind_of_layer_gets_an_attention_that_knows_documents(monkeypatch):
    def chosen(platform, *overrides):
        config = load_config(["model=llama3_8b", MASKED, *overrides])
        built = documents.document_attention(spec_of(config, platform), attention)
        return (built, None) if isinstance(built, type) else (built.func, built.keywords)

    attention, te, longest = layers.TorchAttention, type("OfTransformerEngine", (), {}), {"longest": 8192}
    monkeypatch.setattr(documents, "_te_attention", lambda: te)
    flash = replace(H200, libraries={"flash_attention": "4.0.0b36"})
    assert chosen(H200) == (te, longest)
    assert chosen(flash, "model.use_flash_attention=true") == (attention, longest)
    assert chosen(H200, "model.transformer_engine=false") == (attention, longest)
    assert chosen(CPU, "trainer.precision=fp32") == (documents.LocalDocumentAttention, None)
