"""The cast of FP8 weights where Transformer Engine is not what it was written for: refused, never passed over."""

import importlib.metadata
import sys
import types
from itertools import accumulate

import pytest
from megatron.core.fp8_utils import quantize_param_shard
from megatron.core.optimizer import distrib_optimizer

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.megatron.stored_weights import cast_masters, install_weight_cast


class Float8Quantizer:
    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True): ...


class Float8CurrentScalingQuantizer:
    def __init__(self, fp8_dtype, device, *, force_pow_2_scales=False, amax_epsilon=0.0): ...


def cast_master_weights_to_fp8(
    model_weights, master_weights, start_offsets, group, manual_post_all_gather_processing=False
): ...


@pytest.fixture
def transformer_engine(monkeypatch):
    """The parts of Transformer Engine 2.12 that are asked for, by their modules, and megatron-core as it comes."""
    parts = {
        "transformer_engine.pytorch.tensor.float8_tensor": {
            "Float8Quantizer": Float8Quantizer,
            "Float8CurrentScalingQuantizer": Float8CurrentScalingQuantizer,
        },
        "transformer_engine.pytorch.tensor.utils": {
            "cast_master_weights_to_fp8": cast_master_weights_to_fp8,
            "post_all_gather_processing": len,
        },
        "transformer_engine.pytorch.optimizers.multi_tensor_apply": {"multi_tensor_applier": len},
        "transformer_engine_torch": {"compute_amax": len, "multi_tensor_compute_scale_and_scale_inv": len},
    }
    modules = {name: types.ModuleType(name) for name in parts}
    for name, module in modules.items():
        vars(module).update(parts[name])
        monkeypatch.setitem(sys.modules, name, module)
        for package in accumulate(name.split(".")[:-1], "{}.{}".format):
            monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.99.0")
    monkeypatch.setattr(distrib_optimizer, "quantize_param_shard", quantize_param_shard)
    return modules


def test_it_is_installed_where_all_is_there(transformer_engine):
    install_weight_cast(of_te=True)
    assert distrib_optimizer.quantize_param_shard is cast_masters


@pytest.mark.parametrize(
    ("module", "name", "instead", "said"),
    [
        ("transformer_engine_torch", "compute_amax", None, "transformer_engine_torch.compute_amax"),
        (
            "transformer_engine.pytorch.tensor.float8_tensor",
            "Float8Quantizer",
            lambda scale, amax, fp8_dtype, usage: None,
            "transformer_engine.pytorch.tensor.float8_tensor.Float8Quantizer(columnwise=)",
        ),
        (
            "transformer_engine.pytorch.tensor.utils",
            "post_all_gather_processing",
            None,
            "transformer_engine.pytorch.tensor.utils.post_all_gather_processing",
        ),
    ],
)
def test_another_transformer_engine_is_refused_with_what_it_lacks(transformer_engine, module, name, instead, said):
    if instead is None:
        delattr(transformer_engine[module], name)
    else:
        setattr(transformer_engine[module], name, instead)
    with pytest.raises(UserError) as error:
        install_weight_cast(of_te=True)
    message = str(error.value)
    assert message.startswith("model.fp8_params=true ")
    assert all(part in message for part in ("2.12", "2.99.0", f": {said}; "))
    assert message.endswith("use another version, or false")
    assert distrib_optimizer.quantize_param_shard is quantize_param_shard


def test_a_module_that_is_gone_is_named(transformer_engine, monkeypatch):
    name = "transformer_engine.pytorch.optimizers.multi_tensor_apply"
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=f": {name};"):
        install_weight_cast(of_te=True)
