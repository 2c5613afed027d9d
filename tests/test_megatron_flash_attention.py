"""FlashAttention-4 in place of cuDNN's attention: what it is given, where it is refused and where planned."""

import importlib.metadata
import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.features.flash_attention import FlashAttention
from gpt_pretrain.rules.machine import check_machine, machine_notes
from tests.attention import SCALE, SHAPES, attention_in_fp64, check_against_fp64, make_inputs
from tests.platforms import CPU, H200, INSTALL_FLASH, spec_of
from tests.refusals import check_told, compose_quickly

ASKED = "model.use_flash_attention=true"
WITH_FLASH = replace(H200, libraries={"flash_attention": "4.0.0b36"})
LLAMA = "model=llama3_8b", "data=mock"


def _in_documents(query, key, value, scale, documents):
    """What the package computes of packed documents [s, heads, width]."""
    borders = documents.pop("cu_seqlens_q")
    assert torch.equal(documents.pop("cu_seqlens_k"), borders)
    assert documents == {"max_seqlen_q": 16, "max_seqlen_k": 16}
    parts = [
        attention_in_fp64(*(each[begin:end].unsqueeze(1) for each in (query, key, value)), scale).squeeze(1)
        for begin, end in pairwise(borders.tolist())
    ]
    return torch.cat(parts).view(query.shape)


@pytest.fixture
def package(monkeypatch):
    """Stands for the package's two kernels on [b, s, heads, width], in fp64, and notes what they were called with."""

    class Package(ModuleType):
        def __init__(self):
            super().__init__("flash_attn.cute.interface")
            self.inputs, self.asked, self.gradients = [], [], []

        def _flash_attn_fwd(self, query, key, value, *, softmax_scale, causal, return_lse, **documents):
            assert causal
            assert return_lse
            self.inputs.append((query, key, value))
            if documents:
                return _in_documents(query, key, value, softmax_scale, documents), torch.full((), 7.0)
            sequences_inside = [each.transpose(0, 1) for each in (query, key, value)]
            out = attention_in_fp64(*sequences_inside, softmax_scale).transpose(0, 1).reshape(query.shape)
            return out, torch.full((), 7.0), None, None, None

        def _flash_attn_bwd(self, *tensors, softmax_scale, causal, deterministic, dq, dk, dv, **documents):
            assert causal
            query, key, value, out, dout, log_sum_exp = tensors
            assert log_sum_exp == 7.0
            inputs = [each.detach().requires_grad_() for each in (query, key, value)]
            with torch.enable_grad():
                if documents:
                    again = _in_documents(*inputs, softmax_scale, documents)
                else:
                    again = attention_in_fp64(*(each.transpose(0, 1) for each in inputs), softmax_scale)
                    again = again.transpose(0, 1).reshape(query.shape)
            assert torch.equal(out, again)
            for into, gradient in zip((dq, dk, dv), torch.autograd.grad(again, inputs, dout), strict=True):
                into.copy_(gradient)
            self.asked.append({"shape": tuple(query.shape), "deterministic": deterministic})
            self.gradients.append((dq, dk, dv))

    package = Package()
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package)
    return package


def test_sequences_side_by_side_are_heads_of_one_sequence(package):
    from gpt_pretrain.kernels.flash_attention import causal_attention

    check_against_fp64(causal_attention, "cpu", torch.float64, 1e-12)
    assert package.asked == [
        {"shape": (1, each.length, each.batch * each.heads, each.width), "deterministic": False}
        for each in SHAPES.values()
    ]


@pytest.mark.parametrize("together", [False, True])
def test_packed_documents_are_given_as_they_are(package, together):
    from gpt_pretrain.kernels.flash_attention import attention_in_documents

    borders = torch.tensor([0, 1, 8, 24], dtype=torch.int32)
    shape, width = (24, 1, 3), 8
    projected = torch.randn(*shape, 3 * width, dtype=torch.float64)
    parts = [each if together else each.contiguous() for each in projected.split(width, dim=-1)]
    inputs = [each.detach().requires_grad_() for each in parts]
    out = attention_in_documents(*inputs, SCALE, borders=borders, longest=16)
    gradient = torch.randn(out.shape, dtype=torch.float64)
    found = torch.autograd.grad(out, inputs, gradient)
    assert [each.data_ptr() for each in package.inputs[0]] == [each.data_ptr() for each in inputs]
    alone = [attention_in_fp64(*(each[a:b] for each in inputs), SCALE) for a, b in pairwise(borders.tolist())]
    torch.testing.assert_close(out, torch.cat([each.view(-1, 1, 3 * width) for each in alone]))
    expected = torch.autograd.grad(torch.cat(alone), inputs, gradient.view(torch.cat(alone).shape))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_contiguous_is_not_copied(package):
    from gpt_pretrain.kernels.flash_attention import causal_attention

    *inputs, _ = make_inputs(SHAPES["four queries to a key"], torch.float32, "cpu")
    causal_attention(*inputs, 1.0)
    assert [each.data_ptr() for each in package.inputs[0]] == [each.data_ptr() for each in inputs]


def test_parts_of_one_projection_are_not_copied_and_values_alone_do_not_keep_it(package):
    from gpt_pretrain.kernels.flash_attention import causal_attention

    query, key, value = torch.randn(5, 2, 3, 3 * 8).split(8, dim=-1)
    causal_attention(query, key, value, 1.0)
    causal_attention(query.clone(), key.clone(), value, 1.0)
    first, second = package.inputs
    assert [each.data_ptr() for each in first] == [each.data_ptr() for each in (query, key, value)]
    assert second[2].untyped_storage().nbytes() == value.numel() * value.element_size()
    assert torch.equal(second[2].view(value.shape), value)


def test_gradients_of_parts_of_one_projection_are_parts_of_one_tensor(package):
    """Which split of the projection takes them as they are: Transformer Engine's asks for strides, storage, offsets."""
    from gpt_pretrain.kernels.flash_attention import causal_attention

    shape, width = (6, 2, 3), 8
    projected = torch.randn(*shape, 3 * width, dtype=torch.float64)
    inputs = [each.requires_grad_() for each in projected.detach().split(width, dim=-1)]
    gradient = torch.randn(6, 2, 3 * width, dtype=torch.float64)
    found = torch.autograd.grad(causal_attention(*inputs, SCALE), inputs, gradient)

    assert [each.untyped_storage().data_ptr() for each in found] == [found[0].untyped_storage().data_ptr()] * 3
    assert [(each.stride(), each.storage_offset()) for each in found] == [
        ((2 * 3 * 24, 3 * 24, 24, 1), offset) for offset in (0, width, 2 * width)
    ]
    # The kernels wrote there themselves.
    assert [each.data_ptr() for each in package.gradients[0]] == [each.data_ptr() for each in found]
    apart = [each.detach().contiguous().requires_grad_() for each in inputs]
    expected = torch.autograd.grad(causal_attention(*apart, SCALE), apart, gradient)
    assert len({each.untyped_storage().data_ptr() for each in expected}) == 3
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("lying", ["in another order", "wider apart", "with other heads", "in another tensor"])
def test_gradients_of_parts_that_lie_otherwise_are_tensors_of_their_own(package, lying):
    from gpt_pretrain.kernels.flash_attention import causal_attention

    parts = list(torch.randn(6, 2, 4, 4 * 8, dtype=torch.float64).split(8, dim=-1))
    of_three = list(torch.randn(6, 2, 4, 3 * 8, dtype=torch.float64).split(8, dim=-1))
    inputs = {
        "in another order": [of_three[1], of_three[0], of_three[2]],
        "wider apart": parts[:3],
        "with other heads": [of_three[0], *(each[:, :, :2] for each in of_three[1:])],
        "in another tensor": [of_three[0], of_three[1], parts[2]],
    }[lying]
    inputs = [each.detach().requires_grad_() for each in inputs]
    found = torch.autograd.grad(causal_attention(*inputs, SCALE).sum(), inputs)
    exact = [each.detach().contiguous().requires_grad_() for each in inputs]
    expected = torch.autograd.grad(attention_in_fp64(*exact, SCALE).sum(), exact)
    assert len({each.untyped_storage().data_ptr() for each in found}) == 3
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("by", ["torch", "environment"])
def test_a_fixed_order_is_asked_for_where_algorithms_are_to_be_deterministic(package, monkeypatch, by):
    from gpt_pretrain.kernels.flash_attention import causal_attention

    if by == "environment":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    *inputs, gradient = make_inputs(SHAPES["one sequence"], torch.float64, "cpu")
    inputs = [each.requires_grad_() for each in inputs]
    causal_attention(*inputs, 1.0).backward(gradient)
    assert [call["deterministic"] for call in package.asked] == [True]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("model.transformer_engine=false",), "model.transformer_engine=false"),
        (("model=tiny", "fp8=delayed", "model.fp8_emulate=true"), "model.fp8_emulate=true"),
        (("fp8=delayed", "model.fp8_dot_product_attention=true"), "model.fp8_dot_product_attention=true"),
        (("model.context_parallel_size=2",), "model.context_parallel_size=2"),
        (("model.attention_dropout=0.1",), "model.attention_dropout=0.1"),
        (("model.cuda_graph_impl=local",), "model.cuda_graph_impl=local"),
        (("model.kv_channels=100",), "heads of 100 channels"),
        (("model.kv_channels=264",), "heads of 264 channels"),
    ],
)
def test_refused_beside_what_it_does_not_go_with_and_left_out_by_null(broken_rules, overrides, named):
    allowed = broken_rules(*LLAMA, *overrides)
    (message,) = set(broken_rules(*LLAMA, *overrides, ASKED)) - set(allowed)
    assert message.startswith(f"{ASKED} ")
    assert f" {named}: " in message
    assert message.endswith("use null or false")
    assert not spec_of(compose_quickly([*LLAMA, *overrides]), WITH_FLASH).kernels.features["use_flash_attention"]


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
            "9.x or 10.x, and this is NVIDIA A100, compute capability 8.0",
        ),
    ],
)
def test_a_machine_without_it_refuses_and_null_does_without(platform, why):
    # Heads that only Hopper takes.
    config = compose_quickly([*LLAMA, "model.kv_channels=192", ASKED])
    with pytest.raises(ConfigError) as refused:
        check_machine(spec_of(config, platform))
    (problem,) = (each for each in refused.value.problems if ASKED in each)
    check_told(problem, [ASKED, why])
    unasked = compose_quickly([*LLAMA])
    check_machine(spec_of(unasked, platform))
    assert not spec_of(unasked, platform).kernels.features["use_flash_attention"]


def test_one_that_is_installed_and_does_not_load_is_told():
    broken = replace(H200, library_problems={"flash_attention": "OSError: libcute_dsl_runtime.so is missing"})
    with pytest.raises(ConfigError, match=r"cannot be used here: OSError: libcute_dsl_runtime\.so is missing; use"):
        check_machine(spec_of(compose_quickly([*LLAMA, ASKED]), broken))
    for without in ("model.kv_channels=64", "model.fused_single_qkv_rope=false", "model.transformer_engine=false"):
        assert machine_notes(spec_of(compose_quickly([*LLAMA, without]), broken)) == []
    told = "Attention is Transformer Engine's, not FlashAttention-4: OSError: libcute_dsl_runtime.so is missing"
    assert machine_notes(spec_of(compose_quickly([*LLAMA]), broken)) == [told]
    assert machine_notes(spec_of(compose_quickly([*LLAMA, "model.use_flash_attention=false"]), broken)) == []


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        (None, (None, None)),
        ("4.0.0b20", (None, "4.0.0b36 or newer is needed, and 4.0.0b20 is installed")),
        ("4.0.0b36", ("4.0.0b36", None)),
        ("4.0.0", ("4.0.0", None)),
    ],
)
def test_the_version_is_the_distributions(package, monkeypatch, installed, found):
    def version(name):
        assert name == "flash-attn-4"
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert FlashAttention.library.find() == found


def test_a_package_that_does_not_load_says_why(package, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0b36")
    monkeypatch.delattr(type(package), "_flash_attn_bwd")
    version, problem = FlashAttention.library.find()
    assert version is None
    assert problem == "AttributeError: module 'flash_attn.cute.interface' has no attribute '_flash_attn_bwd'"
    # None stands for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    version, problem = FlashAttention.library.find()
    assert version is None
    assert problem.startswith("ModuleNotFoundError: import of flash_attn.cute.interface halted")


def test_null_takes_it_where_it_was_measured():
    blackwell = replace(WITH_FLASH, device_name="NVIDIA B200", compute_capability=(10, 0))
    for overrides in ([], ["fp8=delayed"], ["fp8=tensorwise", "model.tensor_model_parallel_size=2"]):
        config = compose_quickly([*LLAMA, *overrides])
        assert spec_of(config, WITH_FLASH).kernels.features["use_flash_attention"]
        assert not spec_of(config, blackwell).kernels.features["use_flash_attention"]
        off = replace(config, model=replace(config.model, use_flash_attention=False))
        assert not spec_of(off, WITH_FLASH).kernels.features["use_flash_attention"]
    for unmeasured in (
        "model.kv_channels=64",
        "model.kv_channels=256",
        "model.fused_single_qkv_rope=false",
        "model.activations_checkpoint_granularity=selective",
    ):
        assert not spec_of(compose_quickly([*LLAMA, unmeasured]), WITH_FLASH).kernels.features["use_flash_attention"]
    # Without rotation queries, keys and values are parts of one tensor, if heads share no keys.
    for model in ("gpt3_1_3b", "gpt2_124m"):
        gpt = f"model={model}", "data=mock"
        assert spec_of(compose_quickly([*gpt]), WITH_FLASH).kernels.features["use_flash_attention"]
        for unmeasured in ("model.num_query_groups=4", "model.kv_channels=256", "model.position_embedding_type=rope"):
            asked = [*gpt, unmeasured, "model.fused_single_qkv_rope=false"]
            assert not spec_of(compose_quickly(asked), WITH_FLASH).kernels.features["use_flash_attention"]
    check_machine(spec_of(compose_quickly([*LLAMA, ASKED]), blackwell))
    check_machine(spec_of(compose_quickly([*LLAMA, ASKED]), WITH_FLASH))
