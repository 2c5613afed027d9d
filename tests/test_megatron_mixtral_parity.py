"""The preset is Mixtral: same weights, same logits and load-balancing loss as `transformers`."""

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker

from gpt_pretrain.huggingface.architectures import Architecture
from gpt_pretrain.huggingface.tensors import tensor_rules
from tests.refusals import compose_quickly
from tests.transformers_reference import (
    Case,
    Weights,
    build_reference,
    built_model,
    local_names,
    make_tokens,
    reference_logits,
    run_model,
    whole_model_name,
)

TOLERANCE = 1e-4
EXPERTS = 4


def mixtral(**kwargs: object) -> Case:
    return Case(
        preset="mixtral_8x7b",
        architecture="Mixtral",
        published={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": False,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        groups=2,
        overrides=[f"model.num_moe_experts={EXPERTS}"],
        **kwargs,
    )


def map_weights(reference: torch.nn.Module, case: Case) -> Weights:
    """Weights of the `transformers` model as local layers have them: Llama's, but for the MLP."""
    source = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    model = compose_quickly(case.override_list()).model
    ours = {
        whole_model_name(rule): rule.conversion.to_ours([source[name] for name in rule.names])
        for rule in tensor_rules(model, Architecture.mixtral)
        if all(name in source for name in rule.names)
    }
    for layer in range(case.layers):
        theirs, name = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
        ours[f"{name}.router.weight"] = source[f"{theirs}.gate.weight"]
        for expert in range(EXPERTS):
            local = f"{name}.experts.local_experts.{expert}"
            ours[f"{local}.linear_fc1.weight"] = source[f"{theirs}.experts.gate_up_proj"][expert]
            ours[f"{local}.linear_fc2.weight"] = source[f"{theirs}.experts.down_proj"][expert]
    return local_names(ours)


def test_logits_equal_those_of_transformers() -> None:
    case = mixtral()
    reference = build_reference(case)
    expected = reference_logits(reference, case)
    with built_model(case, map_weights(reference, case)) as model:
        logits = run_model(model, case)
    assert expected.std() > 0.5, "logits this flat would agree whatever the model computes"
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0.0)


def test_comparison_sees_another_number_of_experts() -> None:
    case = mixtral()
    reference = build_reference(case)
    with built_model(case, map_weights(reference, case), "model.moe_router_topk=3") as model:
        difference = run_model(model, case) - reference_logits(reference, case)
    assert difference.abs().max() > 5 * TOLERANCE


def test_load_balancing_loss_is_that_of_transformers() -> None:
    """Of one layer: `transformers` takes the means over all layers first, and counts each of a token's experts."""
    case = mixtral(layers=1)
    reference = build_reference(case)
    tokens = make_tokens(case)
    expected = reference(input_ids=tokens, labels=tokens, output_router_logits=True).aux_loss.item() / 2
    destroy_moe_metrics_tracker()
    with built_model(case, map_weights(reference, case)) as model:
        model.train()
        model(tokens, torch.arange(case.length).expand_as(tokens), None)
        (loss,) = get_moe_metrics_tracker().metrics["load_balancing_loss"].values.tolist()
    assert expected > 1.01, "a router this even would agree whatever is computed"
    assert loss == pytest.approx(expected, rel=1e-5)
