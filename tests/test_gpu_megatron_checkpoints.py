"""Checkpoints of Megatron-LM's usual layers, Transformer Engine's: names, experts in one kernel, FP8 state."""

import pytest
import torch

from gpt_pretrain.checkpoint.saved_model import CheckpointTensors
from gpt_pretrain.export import main as export_main
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.import_megatron import main
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.megatron_checkpoints import MODELS, load_gpt, logits_of, save_gpt

pytestmark = pytest.mark.gpu

TOKENS = torch.arange(64).view(2, 32) * 3 % 250


@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_transformer_engine_come_in_and_go_out(name, fp8, tmp_path, capsys):
    engine = {"transformer_impl": "transformer_engine", "params_dtype": torch.bfloat16, "fp8": fp8}
    arguments = {**MODELS[name], **engine}
    with process_groups(load_config([]).model, read_launch({}), detect_platform()):
        before = save_gpt(tmp_path / "there", arguments)
        assert main([f"path={tmp_path / 'there'}", f"out={tmp_path / 'ours'}"]) == 0
        assert "_extra_state" in capsys.readouterr().out
        assert export_main([f"checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'back'}", "format=megatron"]) == 0
        # Its loader finds every tensor and every module's state, or raises.
        after = load_gpt(tmp_path / "back" / "release", arguments)
        there, back = CheckpointTensors(tmp_path / "there"), CheckpointTensors(tmp_path / "back" / "release")
        assert set(there) == set(back)
        assert all(torch.equal(there.read(key), back.read(key)) for key in there)
        if fp8 is None:
            assert torch.equal(logits_of(before, TOKENS), logits_of(after, TOKENS))
