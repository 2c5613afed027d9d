"""FlashAttention-4 in place of cuDNN's attention: what it is given, where it is refused and where planned."""

import importlib.metadata
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.launch import read_launch
from gpt_pretrain.config.load import load_config
from gpt_pretrain.megatron.platform import check_platform, flash_attention, platform_notes
from gpt_pretrain.megatron.platform_kernels import plan_kernels
from tests.attention import SHAPES, attention_in_fp64, check_against_fp64, make_inputs
from tests.platforms import CPU, H200, INSTALL_FLASH

ASKED = "model.use_flash_attention=true"
WITH_FLASH = replace(H200, flash_attention="4.0.0b36")
LLAMA = "model=llama3_8b", "data=mock"


@pytest.fixture
def asked(monkeypatch):
    """Stands for the package, and notes what it was called with: attention of [b, s, heads, width], as it documents."""
    calls = []

    def flash_attn_func(query, key, value, *, softmax_scale, causal, deterministic):
        calls.append({"shape": tuple(query.shape), "causal": causal, "deterministic": deterministic})
        out = attention_in_fp64(*(each.transpose(0, 1) for each in (query, key, value)), softmax_scale)
        return out.transpose(0, 1).reshape(query.shape), None

    package = ModuleType("flash_attn.cute")
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    return calls


def test_sequences_side_by_side_are_heads_of_one_sequence(asked):
    from gpt_pretrain.megatron.flash_attention import causal_attention

    check_against_fp64(causal_attention, "cpu", torch.float64, 1e-12)
    shapes = SHAPES.values()
    assert asked == [
        {"shape": (1, each.length, each.batch * each.heads, each.width), "causal": True, "deterministic": False}
        for each in shapes
    ]


@pytest.fixture
def given(asked, monkeypatch):
    """What the package was given."""
    seen = []
    package = sys.modules["flash_attn.cute"]
    inner = package.flash_attn_func
    monkeypatch.setattr(package, "flash_attn_func", lambda *given, **how: seen.extend(given) or inner(*given, **how))
    return seen


def test_what_is_contiguous_is_not_copied(given):
    from gpt_pretrain.megatron.flash_attention import causal_attention

    *inputs, _ = make_inputs(SHAPES["four queries to a key"], torch.float32, "cpu")
    causal_attention(*inputs, 1.0)
    assert [each.data_ptr() for each in given] == [each.data_ptr() for each in inputs]


def test_parts_of_one_projection_are_not_copied_and_values_alone_do_not_keep_it(given):
    from gpt_pretrain.megatron.flash_attention import causal_attention

    query, key, value = torch.randn(5, 2, 3, 3 * 8).split(8, dim=-1)
    causal_attention(query, key, value, 1.0)
    assert [each.data_ptr() for each in given] == [each.data_ptr() for each in (query, key, value)]
    given.clear()
    causal_attention(query.clone(), key.clone(), value, 1.0)
    assert given[2].untyped_storage().nbytes() == value.numel() * value.element_size()
    assert torch.equal(given[2].view(value.shape), value)


@pytest.mark.parametrize("by", ["torch", "environment"])
def test_a_fixed_order_is_asked_for_where_algorithms_are_to_be_deterministic(asked, monkeypatch, by):
    from gpt_pretrain.megatron.flash_attention import causal_attention

    if by == "environment":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    *inputs, _ = make_inputs(SHAPES["one sequence"], torch.float64, "cpu")
    causal_attention(*inputs, 1.0)
    assert [call["deterministic"] for call in asked] == [True]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.transformer_engine=false",),
            "model.transformer_engine=false: it takes the place of Transformer Engine's attention",
        ),
        (
            ("model=tiny", "fp8=delayed", "model.fp8_emulate=true"),
            "model.fp8_emulate=true: it takes the place of Transformer Engine's attention",
        ),
        (
            ("fp8=delayed", "model.fp8_dot_product_attention=true"),
            "model.fp8_dot_product_attention=true: its products are in BF16",
        ),
        (
            ("model.context_parallel_size=2",),
            "model.context_parallel_size=2: ranks exchange keys and values in Transformer Engine's attention",
        ),
        (("model.attention_dropout=0.1",), "model.attention_dropout=0.1: it drops nothing"),
        (("model.cuda_graph_impl=local",), "model.cuda_graph_impl=local: untried in layers that are replayed"),
        (("model.kv_channels=100",), "heads of 100 channels: it takes multiples of 8 up to 256"),
        (("model.kv_channels=264",), "heads of 264 channels: it takes multiples of 8 up to 256"),
    ],
)
def test_refused_beside_what_it_does_not_go_with_and_left_out_by_null(broken_rules, overrides, message):
    allowed = broken_rules(*LLAMA, *overrides)
    refused = set(broken_rules(*LLAMA, *overrides, ASKED)) - set(allowed)
    assert refused == {f"{ASKED} does not go with {message}; use null or false"}
    assert not plan_kernels(load_config([*LLAMA, *overrides]), WITH_FLASH).use_flash_attention


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        (CPU, "there is no CUDA device"),
        (H200, f"it is not installed; {INSTALL_FLASH}"),
        (replace(WITH_FLASH, transformer_engine=None), "it takes the place of Transformer Engine's attention"),
        (
            replace(WITH_FLASH, device_name="NVIDIA B200", compute_capability=(10, 0)),
            "on NVIDIA B200, compute capability 10.0 it takes heads of up to 128 channels, not of 192",
        ),
        (
            replace(WITH_FLASH, device_name="NVIDIA A100", compute_capability=(8, 0)),
            "it is for compute capability 9.x and 10.x here, and this is NVIDIA A100, compute capability 8.0",
        ),
    ],
)
def test_a_machine_without_it_refuses_and_null_does_without(platform, why):
    # Heads that only Hopper takes.
    config = load_config([*LLAMA, "model.kv_channels=192", ASKED])
    with pytest.raises(ConfigError) as refused:
        check_platform(config, platform, read_launch({}))
    (problem,) = (each for each in refused.value.problems if ASKED in each)
    assert problem == f"{ASKED}, but FlashAttention-4 cannot be used here: {why}. Use null or false"
    unasked = load_config([*LLAMA])
    check_platform(unasked, platform, read_launch({}))
    assert not plan_kernels(unasked, platform).use_flash_attention


def test_one_that_is_installed_and_does_not_load_is_told():
    broken = replace(H200, flash_attention_problem="OSError: libcute_dsl_runtime.so is missing")
    with pytest.raises(ConfigError, match=r"cannot be used here: OSError: libcute_dsl_runtime\.so is missing\. Use"):
        check_platform(load_config([*LLAMA, ASKED]), broken, read_launch({}))
    for without in ("model.kv_channels=64", "model.fused_single_qkv_rope=false", "model.transformer_engine=false"):
        assert platform_notes(load_config([*LLAMA, without]), broken) == []
    told = "Attention is Transformer Engine's, not FlashAttention-4: OSError: libcute_dsl_runtime.so is missing"
    assert platform_notes(load_config([*LLAMA]), broken) == [told]
    assert platform_notes(load_config([*LLAMA, "model.use_flash_attention=false"]), broken) == []


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        (None, (None, None)),
        ("4.0.0b20", (None, "4.0.0b36 or newer is needed, and 4.0.0b20 is installed")),
        ("4.0.0b36", ("4.0.0b36", None)),
        ("4.0.0", ("4.0.0", None)),
    ],
)
def test_the_version_is_the_distributions(asked, monkeypatch, installed, found):
    def version(name):
        assert name == "flash-attn-4"
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert flash_attention() == found


def test_a_package_that_does_not_load_says_why(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0b36")
    # None stands for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    version, problem = flash_attention()
    assert version is None
    assert problem.startswith("ModuleNotFoundError: import of flash_attn.cute halted")


def test_null_takes_it_where_it_was_measured():
    blackwell = replace(WITH_FLASH, device_name="NVIDIA B200", compute_capability=(10, 0))
    for overrides in ([], ["fp8=delayed"], ["fp8=tensorwise", "model.tensor_model_parallel_size=2"]):
        config = load_config([*LLAMA, *overrides])
        assert plan_kernels(config, WITH_FLASH).use_flash_attention
        assert not plan_kernels(config, blackwell).use_flash_attention
        off = replace(config, model=replace(config.model, use_flash_attention=False))
        assert not plan_kernels(off, WITH_FLASH).use_flash_attention
    for unmeasured in ("model.kv_channels=64", "model.kv_channels=256", "model.fused_single_qkv_rope=false"):
        assert not plan_kernels(load_config([*LLAMA, unmeasured]), WITH_FLASH).use_flash_attention
    check_platform(load_config([*LLAMA, ASKED]), blackwell, read_launch({}))
    check_platform(load_config([*LLAMA, ASKED]), WITH_FLASH, read_launch({}))
