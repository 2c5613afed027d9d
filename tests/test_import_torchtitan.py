"""torchtitan's Llama 3 comes in from its distributed checkpoints, with rows of queries and keys in our rope's order."""

import shutil
from functools import reduce

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gpt_pretrain.checkpoint.load import load_weights, verify_checkpoint
from gpt_pretrain.config.source import Source
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.huggingface.torchtitan import pairs_to_halves
from gpt_pretrain.import_torchtitan import main
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.hostile_pickles import hostile_pickles
from tests.saved_models import build_trainable
from tests.transformers_reference import build_reference, llama, make_tokens, reference_logits

CASE = llama("llama3_8b", "Llama", groups=2, theta=5e5, epsilon=1e-5, vocab_size=256)
# In the order of torchtitan's model, whose names the published ones become.
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def torchtitan_state():
    """The reference's weights by torchtitan's names; each pair of channels that rotate together stands side by side."""
    width = CASE.width // CASE.heads
    # Channel c of the first half rotates with channel c of the second.
    order = [channel for pair in range(width // 2) for channel in (pair, pair + width // 2)]
    state = {}
    for published, value in build_reference(CASE).state_dict().items():
        name = reduce(lambda name, pair: name.replace(*pair), NAMES.items(), published)
        rotates = ".wq." in name or ".wk." in name
        rows = value.view(-1, width, value.size(1))[:, order].flatten(0, 1) if rotates else value
        state[name] = rows.clone()
    return state


def save(folder, state, nested=False):
    states = {"train_state": {"step": torch.tensor(5)}, "optimizer": {"state.norm.weight.exp_avg": torch.ones(3)}}
    dcp.save({**states, **({"model": state} if nested else state)}, checkpoint_id=folder, no_dist=True)


def import_model(folder, out, *overrides):
    keys = [key for key in (*CASE.override_list(), *overrides) if not key.startswith(("data=", "trainer."))]
    return main([f"path={folder}", f"out={out}", f"overrides=[{','.join(keys)}]"])


@pytest.mark.parametrize("nested", [False, True])
def test_torchtitans_llama_computes_what_transformers_does(nested, tmp_path):
    save(tmp_path / "step-5", torchtitan_state(), nested)
    assert import_model(tmp_path / "step-5", tmp_path / "ours") == 0
    install_cpu_device()
    short = ["data=mock", "model.micro_batch_size=2", "model.global_batch_size=2", "trainer.precision=fp32"]
    config = load_config(["experiment=imported", *short], Source(config_dir=tmp_path / "ours"))
    with process_groups(config.model, read_launch({}), detect_platform()):
        trainable = build_trainable(config)
        load_weights(verify_checkpoint(tmp_path / "ours"), trainable, config, {})
        tokens = make_tokens(CASE)
        with torch.no_grad():
            ours = trainable.model.gpt_chunks[0](tokens, torch.arange(CASE.length).expand_as(tokens), None)
    torch.testing.assert_close(ours[..., :256], reference_logits(build_reference(CASE), CASE), rtol=0.0, atol=1e-4)


def test_scores_by_both_ropes_are_equal():
    width, length = 8, 5
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, 2 * width, 16, generator=generator, dtype=torch.float64)
    x = torch.randn(length, 16, generator=generator, dtype=torch.float64)
    angles = torch.outer(torch.arange(length).double(), 10000.0 ** (-torch.arange(0, width, 2).double() / width))

    def by_pairs(weight):
        pairs = torch.view_as_complex((x @ weight.t()).view(length, -1, width // 2, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(2)

    def by_halves(weights):
        heads = [(x @ pairs_to_halves(weight, width).t()).view(1, length, -1, width) for weight in weights]
        q, k = (each.transpose(1, 2) for each in heads)
        whole = torch.cat([angles, angles], dim=-1)[None]
        return [each[0].transpose(0, 1) for each in apply_rotary_pos_emb(q, k, whole.cos(), whole.sin())]

    expected = torch.einsum("qhd,khd->hqk", by_pairs(rows[0]), by_pairs(rows[1]))
    torch.testing.assert_close(torch.einsum("qhd,khd->hqk", *by_halves(rows)), expected)


def _drop_head(folder):
    state = torchtitan_state()
    del state["output.weight"]
    shutil.rmtree(folder)
    save(folder, state)


def _with_experts(folder):
    shutil.rmtree(folder)
    save(folder, torchtitan_state() | {"layers.0.moe.experts.w1": torch.ones(2, 3, 3)})


@pytest.mark.parametrize(
    ("damage", "overrides", "named"),
    [
        (lambda folder: None, ["model.num_layers=9"], ["model.layers.2", "overrides"]),
        (lambda folder: None, ["model.hidden_size=128"], ["[64, 64]"]),
        (lambda folder: None, ["model.qk_layernorm=true"], ["model.qk_layernorm"]),
        (_drop_head, [], ["lm_head.weight"]),
        (_with_experts, [], ["layers.0.moe.experts.w1", "import_hf"]),
        (lambda folder: (folder / ".metadata").unlink(), [], [".metadata", "step-"]),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), [], [".distcp"]),
    ],
)
def test_what_is_no_such_checkpoint_is_refused_by_name(damage, overrides, named, tmp_path, capsys):
    save(tmp_path / "step-5", torchtitan_state())
    damage(tmp_path / "step-5")
    assert import_model(tmp_path / "step-5", tmp_path / "ours", *overrides) == 2
    told = capsys.readouterr().err
    assert [name for name in named if name not in told] == [], told


def test_nothing_in_its_index_runs(tmp_path, capsys):
    canary = tmp_path / "canary"
    for content in hostile_pickles(canary).values():
        shutil.rmtree(tmp_path / "step-5", ignore_errors=True)
        save(tmp_path / "step-5", torchtitan_state())
        (tmp_path / "step-5" / ".metadata").write_bytes(content)
        assert import_model(tmp_path / "step-5", tmp_path / "ours") == 2
        assert ".metadata" in capsys.readouterr().err
        assert not canary.exists()
