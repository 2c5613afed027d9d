"""Checkpoints of Transformer Engine's layers, FP8 weights included, go out as the values that the layers have."""

from dataclasses import asdict

import pytest
import torch
from megatron.core.fp8_utils import is_float8tensor
from safetensors.torch import load_file

from gpt_pretrain.export import main as export_main
from gpt_pretrain.generate import GenerateArguments
from gpt_pretrain.training.generation import continuations
from tests.saved_models import saved_model, small_tokenizer

pytestmark = pytest.mark.gpu

LLAMA = (
    "model=llama3_8b",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_query_groups=2",
    "model.vocab_size=384",
    "model.encoder_seq_length=128",
    "model.max_position_embeddings=128",
    "model.transformer_engine=true",
    "trainer.precision=bf16",
)


@pytest.mark.parametrize("fp8_params", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_weights_of_an_fp8_run_go_out_in_bf16(recipe, fp8_params, tmp_path):
    fp8 = (f"fp8={recipe}", f"model.fp8_params={str(fp8_params).lower()}")
    with saved_model(tmp_path, *LLAMA, *fp8, tokenizer=small_tokenizer()) as saved:
        weight = saved.model.decoder.layers[1].mlp.linear_fc2.weight
        assert is_float8tensor(weight) == fp8_params
        # A plain tensor's dequantize() is for torch's own quantized types.
        values = (weight.dequantize() if fp8_params else weight).detach().to(torch.bfloat16).cpu()
    assert export_main([f"checkpoint={saved.path}", f"out={tmp_path / 'hf'}"]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert exported.dtype is torch.bfloat16
    assert torch.equal(exported, values)
    given = asdict(GenerateArguments(checkpoint=str(saved.path), prompt="def", max_new_tokens=4))
    # The command imports them before.
    del given["extensions"]
    (text,) = continuations(**given)
    assert text
