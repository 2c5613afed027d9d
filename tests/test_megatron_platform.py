"""What a machine offers decides the nulls of the kernel keys, and which explicit settings are refused."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpt_pretrain.config.choices import CrossEntropyFusion, CudaGraphImpl
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import Launch, read_launch
from gpt_pretrain.rules.machine import check_machine, machine_notes
from gpt_pretrain.rules.model import kernel_problems
from gpt_pretrain.run.kernels import Kernels, describe_kernels
from gpt_pretrain.run.platform import Platform
from gpt_pretrain.run.products import resolve
from tests.platforms import CPU, H200, H200_WITHOUT_TE, INSTALL_TE, spec_of
from tests.refusals import Refused, Rules, check_refused, check_told, compose_quickly

GPU_WITHOUT_TE, GPU = H200_WITHOUT_TE, H200
GPU_WITH_BROKEN_TE = replace(GPU_WITHOUT_TE, transformer_engine_problem="OSError: libcublas.so.13 is missing")
APEX = {"apex_layer_norm": True, "apex_softmax": True, "apex_weight_gradient": True}
GPU_WITH_APEX = replace(GPU, **APEX)
APEX_WITHOUT_TE = replace(GPU_WITHOUT_TE, **APEX)

SMALL_IN_FP8 = ("model=gpt2_124m", "fp8=tensorwise")
B200 = replace(GPU, device_name="NVIDIA B200", compute_capability=(10, 0))
MICRO16, MICRO17 = (
    (f"model.micro_batch_size={micro}", f"model.global_batch_size={micro}", "model.vocab_size=50257")
    for micro in (16, 17)
)
TP8 = ("model.tensor_model_parallel_size=8", "model.sequence_parallel=true")
GELU_WITHOUT_BIAS = ("model=gpt2_124m", "model.bias=false")
TE, ACTIVATION, DROPOUT, SOFTMAX, ROPE, QKV, GRADIENT, LOSS = (
    "transformer_engine",
    "bias_activation_fusion",
    "bias_dropout_add_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "fused_single_qkv_rope",
    "gradient_accumulation_fusion",
    "cross_entropy_fusion_impl",
)
CAST, ROWS, ATTENTION = "activation_cast_fusion", "embedding_gradient_fusion", "torch_attention"
SUM, QKV_CAST = "residual_gradient_fusion", "qkv_cast_fusion"
FUSED_LOSS = "cross_entropy_loss_fusion"
NATIVE, LINEAR = (f"model.cross_entropy_fusion_impl={name}" for name in ("native", "linear"))


def launched(local_rank: int = 0, local_world_size: int = 1) -> Launch:
    return replace(
        read_launch({}),
        rank=local_rank,
        world_size=local_world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )


def problems_on(platform: Platform) -> Rules:
    """What a machine cannot meet of a command line."""

    def problems(overrides: Sequence[str], _: int | None) -> list[str]:
        try:
            check_machine(spec_of(compose_quickly(overrides), platform, launched()))
        except ConfigError as error:
            return list(error.problems)
        return []

    return problems


def active(kernels: Kernels) -> set[str]:
    return {name for name, value in kernels.values().items() if value}


@pytest.mark.parametrize(
    ("platform", "overrides", "expected"),
    [
        (CPU, [], set()),
        (CPU, ["model=gpt2_124m"], set()),
        (GPU, ["model=llama3_8b"], {TE, ACTIVATION, DROPOUT, SUM, ROPE, QKV, GRADIENT, ROWS, LOSS}),
        # A learned position table: no rope to fuse.
        (GPU, ["model=gpt2_124m", *MICRO16], {TE, ACTIVATION, DROPOUT, GRADIENT, ROWS, LOSS}),
        # 17,408 tokens for 50,257 rows are more than a third, and so are 8,192 for 16,032 of 128,256 rows on each rank.
        (GPU, ["model=gpt2_124m", *MICRO17], {TE, ACTIVATION, DROPOUT, GRADIENT, LOSS}),
        (GPU, ["model=llama3_8b", *TP8], {TE, ACTIVATION, DROPOUT, ROPE, QKV, GRADIENT, LOSS}),
        # Separate operations are asked for, and so is what the one kernel was not tried with.
        (GPU, ["model=llama3_8b", f"model.{ROPE}=false"], {TE, ACTIVATION, DROPOUT, SUM, GRADIENT, ROWS, LOSS}),
        (
            GPU,
            ["model=llama3_8b", "model.cuda_graph_impl=local"],
            {TE, ACTIVATION, DROPOUT, ROPE, GRADIENT, LOSS, "cuda_graph_impl"},
        ),
        # The fused GELU adds a bias and is the tanh form.
        (GPU, ["model=gpt2_124m", "model.activation=gelu"], {TE, DROPOUT, GRADIENT, LOSS}),
        (GPU, GELU_WITHOUT_BIAS, {TE, DROPOUT, GRADIENT, LOSS}),
        # To be compared with: the plain loss.
        (
            GPU,
            ["model=llama3_8b", "trainer.deterministic=true"],
            {TE, ACTIVATION, DROPOUT, SUM, ROPE, QKV, GRADIENT, ROWS},
        ),
        (GPU, SMALL_IN_FP8, {TE, ACTIVATION, DROPOUT, GRADIENT, LOSS, "cuda_graph_impl"}),
        (GPU, [*SMALL_IN_FP8, "model.cuda_graph_impl=none"], {TE, ACTIVATION, CAST, DROPOUT, GRADIENT, LOSS}),
        (GPU, [*SMALL_IN_FP8, *MICRO16], {TE, ACTIVATION, DROPOUT, GRADIENT, LOSS, "cuda_graph_impl"}),
        (
            GPU,
            ["model=llama3_8b", "model.fp8=true"],
            {TE, ACTIVATION, CAST, DROPOUT, SUM, ROPE, QKV, QKV_CAST, GRADIENT, ROWS, LOSS},
        ),
        (
            GPU,
            ["model=llama3_8b", "fp8=delayed"],
            {TE, ACTIVATION, CAST, DROPOUT, SUM, ROPE, QKV, QKV_CAST, GRADIENT, ROWS, LOSS},
        ),
        (
            GPU,
            ["model=llama3_8b", "fp8=delayed", f"model.{CAST}=false"],
            {TE, ACTIVATION, DROPOUT, SUM, ROPE, QKV, QKV_CAST, GRADIENT, ROWS, LOSS},
        ),
        (
            GPU,
            ["model=llama3_8b", "fp8=tensorwise"],
            {TE, ACTIVATION, CAST, DROPOUT, SUM, ROPE, QKV, QKV_CAST, GRADIENT, ROWS, LOSS},
        ),
        (GPU, ["model=llama3_8b", "fp8=blockwise"], {TE, ACTIVATION, DROPOUT, SUM, ROPE, QKV, GRADIENT, ROWS, LOSS}),
        (B200, ["model=llama3_8b", "fp8=delayed"], {TE, ACTIVATION, DROPOUT, ROPE, QKV, GRADIENT, ROWS, LOSS}),
        # Settings that exclude it come first, as it would be refused beside them.
        (GPU, ["model=gpt2_124m", "fp8=delayed", "model.activation=gelu"], {TE, DROPOUT, GRADIENT, LOSS}),
        (
            GPU,
            ["model=llama3_8b", "fp8=delayed", f"model.{ACTIVATION}=false"],
            {TE, DROPOUT, SUM, ROPE, QKV, QKV_CAST, GRADIENT, ROWS, LOSS},
        ),
        (
            GPU,
            ["model=llama3_8b", "model.grad_reduce_in_fp32=false"],
            {TE, ACTIVATION, DROPOUT, SUM, ROPE, QKV, GRADIENT, ROWS, LOSS},
        ),
        (GPU, ["fp8=delayed", "model.fp8_emulate=true"], {ACTIVATION, DROPOUT, ATTENTION, QKV, GRADIENT, LOSS}),
        (
            GPU,
            ["model=llama3_8b", "model.transformer_engine=false"],
            {ACTIVATION, DROPOUT, ATTENTION, QKV, GRADIENT, ROWS, LOSS},
        ),
        (GPU, ["model=llama3_8b", f"model.{GRADIENT}=false"], {TE, ACTIVATION, DROPOUT, SUM, ROPE, QKV, LOSS}),
        (GPU_WITHOUT_TE, ["model=llama3_8b"], {ACTIVATION, DROPOUT, ATTENTION, QKV, GRADIENT, ROWS, LOSS}),
        (GPU_WITH_BROKEN_TE, ["model=llama3_8b"], {ACTIVATION, DROPOUT, ATTENTION, QKV, GRADIENT, ROWS, LOSS}),
        # PyTorch's attention has no softmax of its own; megatron-core's, for references, is apex's.
        (GPU_WITH_APEX, ["model=llama3_8b"], {TE, ACTIVATION, DROPOUT, SUM, ROPE, QKV, GRADIENT, ROWS, LOSS}),
        (APEX_WITHOUT_TE, ["model=llama3_8b"], {ACTIVATION, DROPOUT, ATTENTION, QKV, GRADIENT, ROWS, LOSS}),
        (
            APEX_WITHOUT_TE,
            ["model=llama3_8b", "trainer.deterministic=true"],
            {ACTIVATION, DROPOUT, SOFTMAX, GRADIENT, ROWS},
        ),
    ],
)
def test_null_becomes_what_the_machine_has(platform: Platform, overrides: list[str], expected: set[str]) -> None:
    config = compose_quickly(["data=mock", *overrides])
    assert active(spec_of(config, platform).kernels) == expected
    # What is planned is never refused.
    check_machine(spec_of(config, platform, launched()))


@pytest.mark.parametrize(
    ("platform", "overrides", "expected"),
    [
        (GPU, [], CrossEntropyFusion.linear),
        (GPU, [NATIVE], CrossEntropyFusion.native),
        (GPU, [f"model.{FUSED_LOSS}=false"], None),
        # To be compared with: the plain loss, unless another is asked for.
        (GPU, ["trainer.precision=fp32", f"model.{TE}=false"], None),
        (GPU, ["trainer.precision=fp32", f"model.{TE}=false", f"model.{FUSED_LOSS}=true"], CrossEntropyFusion.linear),
        (GPU, ["trainer.deterministic=true"], None),
        (GPU, ["trainer.deterministic=true", LINEAR], CrossEntropyFusion.linear),
        (GPU_WITHOUT_TE, [f"model.{FUSED_LOSS}=true"], CrossEntropyFusion.linear),
        (CPU, [], None),
        (CPU, [LINEAR], CrossEntropyFusion.linear),
        (CPU, [f"model.{FUSED_LOSS}=true"], CrossEntropyFusion.linear),
    ],
)
def test_the_loss_is_linear_where_nothing_speaks_against_it(
    platform: Platform, overrides: list[str], expected: CrossEntropyFusion | None
) -> None:
    config = compose_quickly(["data=mock", *overrides])
    assert spec_of(config, platform).kernels.cross_entropy_fusion_impl is expected
    check_machine(spec_of(config, platform, launched()))


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        # 6 operations for each of 7,077,888 weights and 32,768 tokens are 1.4e12; of twice as many tokens 2.8e12.
        (SMALL_IN_FP8, 1, CudaGraphImpl.local),
        ((*SMALL_IN_FP8, "model.micro_batch_size=64"), 1, None),
        ((*SMALL_IN_FP8, "model.micro_batch_size=64", "model.cuda_graph_impl=local"), 1, CudaGraphImpl.local),
        ((*SMALL_IN_FP8, "model.cuda_graph_impl=none"), 1, None),
        (SMALL_IN_FP8, 2, None),
        (("model=gpt3_1_3b", "fp8=tensorwise"), 1, None),
        # Small enough, and compared with nothing yet.
        ((*SMALL_IN_FP8, "model.position_embedding_type=rope"), 1, None),
        ((*SMALL_IN_FP8, "model.first_last_layers_bf16=true"), 1, None),
        ((*SMALL_IN_FP8, "model.fp8_exclude=[decoder.layers.0.*]"), 1, None),
        # Fewer kernels: the GPU is the slower one, or nearly so.
        (("model=gpt2_124m",), 1, None),
        (("model=gpt2_124m", "model.cuda_graph_impl=local"), 1, CudaGraphImpl.local),
        # What would be refused beside graphs that are asked for, and what is untried in them.
        (("model=gpt2_124m", "fp8=delayed"), 1, None),
        ((*SMALL_IN_FP8, "model.fp8_params=true"), 1, None),
        ((*SMALL_IN_FP8, "model.overlap_grad_reduce=true"), 1, None),
        ((*SMALL_IN_FP8, "model.hidden_dropout=0.1"), 1, None),
        ((*SMALL_IN_FP8, "logging.fp8_statistics_interval=10"), 1, None),
        ((*SMALL_IN_FP8, "model.activation_cast_fusion=true"), 1, None),
        ((*SMALL_IN_FP8, "model.use_flash_attention=true"), 1, None),
    ],
)
def test_graphs_are_chosen_where_they_gain_and_nothing_is_in_the_way(
    overrides: tuple[str, ...], world_size: int, expected: CudaGraphImpl | None
) -> None:
    config = compose_quickly(["data=mock", *overrides])
    assert spec_of(config, GPU, launched(local_world_size=world_size)).kernels.cuda_graph_impl is expected
    # Without Transformer Engine there is nothing to choose.
    if config.model.cuda_graph_impl is None:
        assert spec_of(config, GPU_WITHOUT_TE, launched(local_world_size=world_size)).kernels.cuda_graph_impl is None
    assert not list(kernel_problems(resolve(config), sizes_known=True))


@pytest.mark.parametrize("key", [TE, ACTIVATION, DROPOUT, SOFTMAX, ROPE, GRADIENT, ROWS])
def test_explicit_false_stands(key: str) -> None:
    config = compose_quickly(["data=mock", "model=llama3_8b", f"model.{key}=false"])
    for platform in (CPU, GPU, GPU_WITH_APEX, APEX_WITHOUT_TE):
        assert key not in active(spec_of(config, platform).kernels)
        check_machine(spec_of(config, platform, launched()))


LEAN = "model.optim.use_precision_aware_optimizer=true model.use_distributed_optimizer=true"
A100 = replace(GPU, device_name="NVIDIA A100", compute_capability=(8, 0))


@pytest.mark.parametrize(
    ("platform", "row"),
    [
        *(
            (platform, Refused(f"model.{TE}=true", told=f"model.{TE}=true {why}"))
            for platform, why in (
                (CPU, "CUDA device"),
                (GPU_WITHOUT_TE, "installed pip '.[te]'"),
                (GPU_WITH_BROKEN_TE, "OSError: libcublas.so.13"),
            )
        ),
        *((CPU, Refused(f"model.{key}=true", told=f"model.{key}=true CUDA")) for key in (ACTIVATION, DROPOUT)),
        (
            replace(CPU, compiler_problem="there is no g++ on the PATH"),
            Refused("model.compile=true", told="model.compile=true g++ PATH"),
        ),
        (CPU, Refused(NATIVE, told=f"{NATIVE} CUDA")),
        (CPU, Refused(LEAN, told="model.optim.use_precision_aware_optimizer=true trainer.precision=auto fp32 CUDA")),
        (
            CPU,
            Refused(
                "model=moe_small parallelism=ep2 model.overlap_moe_expert_parallel_comm=true",
                told="model.overlap_moe_expert_parallel_comm=true trainer.precision=auto fp32 CUDA",
                world_size=2,
            ),
        ),
        (A100, Refused(f"{LEAN} model.optim.exp_avg_dtype=fp8", told="model.optim.exp_avg_dtype=fp8 8.9 A100 8.0")),
        (CPU, Refused(f"model.{ROPE}=true")),
        *(
            (platform, Refused(f"model=moe_small {setting}", told=f"{setting} {why} gpt_pretrain.doctor"))
            for platform, why in ((CPU, "CUDA device"), (GPU_WITHOUT_TE, "installed '.[te]'"))
            for setting in (
                "model.moe_permute_fusion=true",
                "model.moe_grouped_gemm=true",
                "model.moe_grouped_kernel=triton",
                "model.moe_grouped_kernel=transformer_engine",
            )
        ),
        (CPU, Refused(f"model.{QKV}=true", told=f"model.{QKV}=true CUDA")),
        (GPU_WITHOUT_TE, Refused(f"model.{SOFTMAX}=true", told=f"model.{SOFTMAX}=true apex")),
        (GPU_WITH_APEX, Refused(f"model.{SOFTMAX}=true", told=f"model.{SOFTMAX}=true Transformer Engine")),
        (
            GPU_WITHOUT_TE,
            Refused("model.context_parallel_size=2", told="model.context_parallel_size=2 installed '.[te]'"),
        ),
        (GPU, Refused(f"model.context_parallel_size=2 model.{TE}=false")),
        (GPU, Refused("trainer.precision=fp32", told="trainer.precision=fp32 TF32")),
        (GPU_WITHOUT_TE, Refused(f"{NATIVE} trainer.precision=fp32", told=f"{NATIVE} trainer.precision=fp32 BF16")),
    ],
)
def test_explicit_setting_that_cannot_be_met_is_refused(platform: Platform, row: Refused) -> None:
    check_refused(
        replace(row, overrides=f"data=mock model=llama3_8b {row.overrides}", told=row.told or row.overrides),
        problems_on(platform),
    )


def test_all_settings_that_cannot_be_met_are_told_together() -> None:
    keys = f"model.{ACTIVATION}=true", f"model.{DROPOUT}=true", NATIVE
    problems = problems_on(CPU)(["data=mock", "model=llama3_8b", *keys], None)
    assert len(problems) == len(keys)


@pytest.mark.parametrize(
    ("platform", "overrides"),
    [
        (GPU, [f"model.{TE}=true", f"model.{ROPE}=true", f"model.{QKV}=true", "model.context_parallel_size=2"]),
        (GPU_WITHOUT_TE, [f"model.{ACTIVATION}=true", f"model.{DROPOUT}=true"]),
        (APEX_WITHOUT_TE, [f"model.{SOFTMAX}=true", f"model.{GRADIENT}=true"]),
        (GPU, ["trainer.precision=fp32", f"model.{TE}=false"]),
    ],
)
def test_explicit_setting_that_can_be_met_is_kept(platform: Platform, overrides: list[str]) -> None:
    config = compose_quickly(["data=mock", "model=llama3_8b", *overrides])
    check_machine(spec_of(config, platform, launched()))
    asked = {override.removeprefix("model.").removesuffix("=true") for override in overrides if "=true" in override}
    assert asked <= active(spec_of(config, platform).kernels)


def test_more_processes_than_gpus_are_refused() -> None:
    config = compose_quickly(["data=mock"])
    check_machine(spec_of(config, GPU, launched(local_rank=7, local_world_size=8)))
    # Without CUDA processes share the cores.
    check_machine(spec_of(config, CPU, launched(local_rank=8, local_world_size=9)))
    with pytest.raises(ConfigError) as refused:
        check_machine(spec_of(config, GPU, launched(local_rank=8, local_world_size=9)))
    check_told(str(refused.value), ["the launcher", "9", "8"])


@pytest.mark.parametrize(
    ("platform", "layers", "fused", "apex"),
    [
        (CPU, "megatron-core local", "none", None),
        (
            GPU,
            "Transformer Engine 2.12.0",
            "bias_activation_fusion, bias_dropout_add_fusion, residual_gradient_fusion, apply_rope_fusion, "
            "fused_single_qkv_rope, "
            "gradient_accumulation_fusion, embedding_gradient_fusion, cross_entropy_fusion_impl (linear)",
            "not installed: nothing is lost but speed",
        ),
        (
            APEX_WITHOUT_TE,
            "megatron-core local",
            "bias_activation_fusion, bias_dropout_add_fusion, torch_attention, fused_single_qkv_rope, "
            "gradient_accumulation_fusion, embedding_gradient_fusion, cross_entropy_fusion_impl (linear)",
            "layer norm, softmax, weight gradient",
        ),
    ],
)
def test_header_names_the_active_parts(platform: Platform, layers: str, fused: str, apex: str | None) -> None:
    kernels = spec_of(compose_quickly(["data=mock", "model=llama3_8b"]), platform).kernels
    expected = {"layers": layers, "fused": fused, **({} if apex is None else {"apex": apex})}
    assert describe_kernels(kernels, platform) == expected


@pytest.mark.parametrize(
    ("platform", "overrides", "told"),
    [
        (CPU, [], None),
        (GPU, [], None),
        (GPU_WITHOUT_TE, [], f"it is not installed; {INSTALL_TE}"),
        (GPU_WITH_BROKEN_TE, [], "OSError: libcublas.so.13 is missing"),
        # Who asks for local layers knows.
        (GPU_WITHOUT_TE, [f"model.{TE}=false"], None),
    ],
)
def test_gpu_without_transformer_engine_is_told(platform: Platform, overrides: list[str], told: str | None) -> None:
    notes = machine_notes(spec_of(compose_quickly(["data=mock", *overrides]), platform))
    assert len(notes) == (told is not None)
    assert all(told is not None and note.endswith(told) for note in notes)


def test_detected_platform_agrees_with_itself() -> None:
    platform = detect_platform()
    assert platform.cuda == (platform.num_gpus > 0)
    if not platform.cuda:
        assert platform == CPU
