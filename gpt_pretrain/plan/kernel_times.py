"""How long the kernels of one microbatch take on one GPU: a roofline for each product and each pass over memory.

A product of [m, k] and [k, n] takes as long as its arithmetic at the peak that training reaches, or as its bytes at the
memory's bandwidth, whichever is longer. Everything else is bytes over bandwidth, and each kernel starts a little after
the last. The passes were counted in the sources of megatron-core 0.19 and Transformer Engine 2.12; the shares of the
peaks are `machine.EFFICIENCY`.
"""

import math
from collections.abc import Iterable

from gpt_pretrain.config.choices import CrossEntropyFusion, Fp8Backend, MoeGroupedKernel
from gpt_pretrain.config.derived import attended_tokens, kv_channels
from gpt_pretrain.config.recipes import Recipe
from gpt_pretrain.features.feature import Feature
from gpt_pretrain.features.qkv_rope import QkvRope
from gpt_pretrain.features.registry import used_features
from gpt_pretrain.plan.experts import token_dispatch
from gpt_pretrain.plan.machine import EFFICIENCY
from gpt_pretrain.run.gpus import Gpu
from gpt_pretrain.run.products import FC1, FC2, Gemm, Linear, gemms
from gpt_pretrain.run.run_spec import RunSpec

# Passes over the logits in memory, in bytes per logit, forward and backward, calibrated (megatron-core's losses in
# benchmarks/lm_head_h200.md): the GEMM writes BF16, the loss reads and writes fp32 for the maximum, the
# shift, the exponential, the sum, the division and the gradient.
LOSS_BYTES_PER_LOGIT = 43
# With `megatron.loss`: one kernel reads the BF16 logits, another reads them and writes the gradient.
LINEAR_LOSS_BYTES_PER_LOGIT = 6
# Kernels of one layer, forward and backward, without products, attention and casts.
ELEMENTWISE_KERNELS = 10
# Attention's products: q·kᵀ and p·v forward, five backward (the scores are computed again).
ATTENTION_PRODUCTS = 7
# Width of the heads whose speed is `Efficiency.attention`; heads of 64 reached 0.59 of that speed (GPT-2 124M).
ATTENTION_WIDTH = 128
# Products of an expert's two linear layers, forward and backward.
PRODUCTS_OF_EXPERT = 6
# Bytes per value of an expert's inner width that its activation reads and writes beyond a dense layer's, forward and
# backward: it multiplies by the routing weight in fp32, whose gradient is a sum over the activation. Two layers of
# Mixtral: 15 ms of 43 on an H100 that a dense layer's passes do not explain.
WEIGHTED_ACTIVATION_BYTES = 20
# Kernels of routing and permutation, forward and backward, without passes over rows: scores, choice, weights, auxiliary
# losses, counts, the sort of the map and the exchange of counts, each over a few values per token.
ROUTING_KERNELS = 80
# Bytes that these read and write per token and expert, in fp32 or as 64-bit indices.
ROUTING_BYTES = 160


def memory_s(gpu: Gpu, num_bytes: float, kernels: int = 1) -> float:
    """Seconds of kernels that only move bytes."""
    return num_bytes / (gpu.bandwidth_tb_s * 1e12 * EFFICIENCY.bandwidth) + kernels * EFFICIENCY.kernel_s


def gemm_s(gpu: Gpu, gemm: Gemm, recipe: Recipe | None, *, accumulates: bool = False) -> float:
    """Seconds of one product; if it `accumulates`, weight gradients are added to fp32 ones, not written in BF16."""
    if gemm.fp8 and recipe is not None:
        size, rate = 1, gpu.fp8_tflops * 1e12 * recipe.cost.peak_share
    else:
        size, rate = 2, gpu.bf16_tflops * 1e12 * EFFICIENCY.bf16
    arithmetic = gemm.flops / rate * (1 + EFFICIENCY.depth / gemm.k)
    read = size * (gemm.m * gemm.k + gemm.k * gemm.n)
    written = (8 if accumulates and gemm.phase == "wgrad" else 2) * gemm.m * gemm.n
    return max(arithmetic, memory_s(gpu, gemm.linear.count * (read + written), kernels=0)) + EFFICIENCY.kernel_s


def _cast_s(gpu: Gpu, linear: Linear, recipe: Recipe, features: Iterable[Feature] = ()) -> float:
    """Casts of the input and of the output's gradient, as rows and as columns: read BF16, write two bytes.

    Where the norm writes FP8 itself, the transposed copy takes another pass. Finding a scale in the tensor itself takes
    one more. TorchAO's codes are written in both layouts at once (`kernels.fp8_codes_triton`).
    """
    separate: float = (4 if recipe.backend is Fp8Backend.torchao else 5) + 2 * recipe.cost.searches_amax
    of_input, of_gradient = separate, separate
    for feature in features:
        of_input, of_gradient = feature.cast_bytes(linear.kind, recipe, of_input, of_gradient)
    inputs, gradients = linear.local_tokens * linear.in_features, linear.tokens * linear.out_features
    return memory_s(gpu, linear.count * (inputs * of_input + gradients * of_gradient), kernels=2)


def _attention_s(gpu: Gpu, spec: RunSpec, tokens: int) -> float:
    """Causal attention: half of the scores, of samples or of the documents in them."""
    model, documents = spec.model, spec.config.plan.document_length
    width = model.num_attention_heads // model.tensor_model_parallel_size * kv_channels(model)
    # Windows and documents exclude each other.
    attended = attended_tokens(model, model.encoder_seq_length) if documents is None else documents
    flops = ATTENTION_PRODUCTS * tokens * attended * width
    # What a score costs besides its products weighs more in narrow heads.
    reached = EFFICIENCY.attention * math.pow(min(1.0, kv_channels(model) / ATTENTION_WIDTH), 0.75)
    reached *= math.prod(feature.attention_speed for feature in used_features(spec))
    return flops / (gpu.bf16_tflops * 1e12 * reached) + 3 * EFFICIENCY.kernel_s


def _elementwise_bytes(spec: RunSpec, layer: list[Linear]) -> float:
    """Bytes that norms, residuals, rotary embeddings and the activation read and write, forward and backward."""
    model = spec.model
    qkv, *_, fc1_layer, fc2_layer = layer
    tokens, local, rows = qkv.tokens, qkv.local_tokens, fc1_layer.tokens * fc1_layer.count
    projected, inner, fc1 = qkv.out_features, fc2_layer.in_features, fc1_layer.out_features
    # Two norms and two residual additions: 4 passes forward, 7 backward each way; the residual stream is read twice.
    stream = 22 * local * model.hidden_size
    activation = (fc1 + inner) + (2 * fc1 + inner)
    if model.num_moe_experts is not None:
        activation += WEIGHTED_ACTIVATION_BYTES // 2 * inner
    # A norm reads and writes its values forward, and reads two tensors and writes one backward. In the kernel that
    # rotates them it only reads them once more, backward.
    norm = 1 if spec.kernels.features[QkvRope.key] else 5
    rotary_or_copy = (4 + norm * model.qk_layernorm) * projected
    bias = (projected if model.bias or model.qkv_bias else 0) + (fc1 + 2 * model.hidden_size if model.bias else 0)
    return 2.0 * (stream + rows * activation + tokens * (rotary_or_copy / 2 + bias))


def _routing_s(gpu: Gpu, spec: RunSpec, layer: list[Linear]) -> float:
    """Routing, permutation, sorting and padding of one layer of experts, forward and backward."""
    model = spec.model
    small = ROUTING_BYTES * layer[0].local_tokens * (model.num_moe_experts or 0)
    passes = token_dispatch(model, layer).passes(used_features(spec))
    return memory_s(gpu, 2.0 * passes * model.hidden_size + small, ROUTING_KERNELS)


def layer_s(gpu: Gpu, spec: RunSpec, layer: list[Linear]) -> dict[str, float]:
    """Seconds of one layer and one microbatch, forward and backward, by kind of work."""
    recipe = None if spec.fp8 is None else spec.fp8.recipe
    in_local_layers = spec.fp8 is not None and spec.fp8.in_local_layers
    seconds = {"GEMMs": 0.0, "FP8 casts": 0.0, "gradient accumulation": 0.0}
    in_fp8 = {linear.kind for linear in layer if linear.precision == "fp8"}
    fused = list(used_features(spec)) if in_fp8 >= {FC1, FC2} else []
    for linear in layer:
        # TorchAO writes weight gradients in BF16, which are added afterwards.
        accumulates = spec.kernels.gradient_accumulation_fusion and not (in_local_layers and linear.precision == "fp8")
        seconds["GEMMs"] += sum(gemm_s(gpu, gemm, recipe, accumulates=accumulates) for gemm in gemms(linear))
        if recipe is not None and linear.precision == "fp8":
            seconds["FP8 casts"] += _cast_s(gpu, linear, recipe, fused)
        if not accumulates:
            # A BF16 gradient of its own, added to the fp32 one: read 2 + 4, write 4.
            seconds["gradient accumulation"] += memory_s(gpu, linear.num_weights * 10)
    seconds["attention"] = _attention_s(gpu, spec, layer[0].tokens)
    elementwise = _elementwise_bytes(spec, layer)
    seconds["norms, activation, residuals"] = memory_s(gpu, elementwise, ELEMENTWISE_KERNELS)
    if spec.model.num_moe_experts is not None:
        seconds["routing and permutation"] = _routing_s(gpu, spec, layer)
    return seconds


def recompute_s(gpu: Gpu, spec: RunSpec, layer: list[Linear], *, whole: bool) -> float:
    """Seconds of a second forward pass of one layer, or of its attention alone."""
    recipe = None if spec.fp8 is None else spec.fp8.recipe
    forward = _attention_s(gpu, spec, layer[0].tokens) * 2 / ATTENTION_PRODUCTS
    if whole:
        forward += sum(gemm_s(gpu, gemms(linear)[0], recipe) for linear in layer)
        forward += memory_s(gpu, _elementwise_bytes(spec, layer) / 3)
        if recipe is not None:
            in_fp8 = [linear for linear in layer if linear.precision == "fp8"]
            forward += sum(_cast_s(gpu, linear, recipe) / 2 for linear in in_fp8)
    return forward


def head_s(gpu: Gpu, spec: RunSpec, head: Linear) -> dict[str, float]:
    """Seconds of the LM head and the loss for one microbatch, forward and backward."""
    logits = head.tokens * head.out_features
    linear = spec.kernels.cross_entropy_fusion_impl is CrossEntropyFusion.linear
    # As for the layers. The linear loss first sums its chunks in fp32: zeroed, then read as 4 bytes, written as BF16.
    unfused = 10 + (10 if linear else 0)
    accumulated = 0 if spec.kernels.gradient_accumulation_fusion else head.num_weights * unfused
    return {
        "LM head": sum(gemm_s(gpu, gemm, None) for gemm in gemms(head)),
        "loss": memory_s(gpu, logits * (LINEAR_LOSS_BYTES_PER_LOGIT if linear else LOSS_BYTES_PER_LOGIT)),
        "gradient accumulation": memory_s(gpu, accumulated) if accumulated else 0.0,
    }


def host_layer_s(spec: RunSpec) -> float:
    """Seconds that the host needs to launch one layer for one microbatch, forward and backward."""
    layout, bf16 = spec.layout, spec.fp8 is None
    if spec.kernels.cuda_graph_impl is not None:
        return EFFICIENCY.host_s_per_graphed_layer
    each = EFFICIENCY.host_s_per_layer if bf16 else EFFICIENCY.host_s_per_fp8_layer
    if spec.model.num_moe_experts is not None and spec.kernels.moe_grouped_kernel is not MoeGroupedKernel.triton:
        product = EFFICIENCY.host_s_per_expert_product if bf16 else EFFICIENCY.host_s_per_fp8_expert_product
        each += PRODUCTS_OF_EXPERT * (spec.model.num_moe_experts // layout.ep) * product
    each += EFFICIENCY.host_s_per_tp_layer if layout.tp > 1 else 0.0
    return each + (EFFICIENCY.host_s_per_cp_layer if layout.cp > 1 else 0.0)
