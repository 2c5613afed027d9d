"""Exports are what was trained: `transformers` computes the same logits from them, whatever layout saved it."""

import json
import shutil
from collections import namedtuple

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.data.tokenizer import train_bpe
from gpt_pretrain.export import main
from gpt_pretrain.huggingface.architectures import Architecture, choose_architecture
from tests.checkpoint_files import flip
from tests.emulated_training import emulate
from tests.forked_runs import fork_ranks
from tests.launching import run_ranks
from tests.saved_models import (
    ARCHITECTURES,
    FAMILIES,
    save_model,
    saved_model,
    small_config,
    small_tokenizer,
    some_tokens,
)

TOLERANCE = 1e-4
LAYERS = (*FAMILIES["llama"], "model.num_layers=4")


def export(*arguments):
    assert main([str(argument) for argument in arguments]) == 0


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()


@torch.no_grad()
def logits_of(directory, tokens):
    return load(directory)(tokens).logits


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A checkpoint, with its tokenizer in the run's directory."""
    with saved_model(tmp_path_factory.mktemp("run"), *FAMILIES["llama"], tokenizer=small_tokenizer()) as saved:
        pass
    return saved


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_logits(family, tmp_path):
    with saved_model(tmp_path, *FAMILIES[family]) as saved:
        # Mistral's class is Llama's where the sliding window is off: it has to be asked for.
        asked = ["architecture=mistral"] if family == "mistral" else []
        export(f"checkpoint={saved.path}", f"out={tmp_path / 'hf'}", *asked)
        tokens = some_tokens(saved.config)
        ours = saved.logits(tokens)
    model = load(tmp_path / "hf")
    assert model.config.model_type == ARCHITECTURES[family]
    assert model.config.vocab_size == 300, "rows that pad the vocabulary stay at home"
    assert ours.std() > 0.5, "logits this flat would agree whatever the model computes"
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, ours, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize(
    "family",
    ["gpt2", "gpt2, exact gelu, untied", "llama", "llama, tied, biases everywhere, wide heads", "qwen3", "phi3"],
)
def test_multipliers_of_mup_move_into_weights(family, tmp_path):
    """`transformers` knows none of them: each is another than 1, and none a power of two."""
    families = {
        **FAMILIES,
        "qwen3": ("model=qwen3_8b", *FAMILIES["llama"][1:]),
        "phi3": ("model=phi4", *FAMILIES["llama"][1:], "model.kv_channels=null"),
    }
    mup = ("use_mup=true", "mup_base_hidden_size=48", "mup_embedding_mult=3", "mup_base_head_dim=7")
    with saved_model(tmp_path, *families[family], *(f"model.{setting}" for setting in mup)) as saved:
        export(f"checkpoint={saved.path}", f"out={tmp_path / 'hf'}")
        tokens = some_tokens(saved.config)
        ours = saved.logits(tokens)
    assert ours.std() > 0.5, "logits this flat would agree whatever the model computes"
    torch.testing.assert_close(logits_of(tmp_path / "hf", tokens), ours, atol=TOLERANCE, rtol=0.0)


def test_checkpoints_with_and_without_mup_have_no_mean(tmp_path, capsys):
    paths = []
    for number, mup in enumerate([(), ("model.use_mup=true", "model.mup_base_hidden_size=32")]):
        save_model(tmp_path / str(number), *FAMILIES["llama"], *mup)
        paths.append(tmp_path / str(number) / "checkpoints" / "step_00000001")
    for first, other in (paths, paths[::-1]):
        assert main([f"checkpoint={first}", f"average=[{other}]", f"out={tmp_path / 'hf'}"]) == 2
        assert "model.use_mup" in capsys.readouterr().err


@pytest.fixture(scope="module")
def exported_by_one_process(tmp_path_factory):
    """The weights that a seed gives, whatever the layout, as they are exported."""
    folder = tmp_path_factory.mktemp("one")
    save_model(folder, *LAYERS)
    export(f"checkpoint={folder / 'checkpoints' / 'step_00000001'}", f"out={folder / 'hf'}")
    return (folder / "hf" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2_vp2"])
def test_every_layout_exports_the_same_file(layout, tmp_path, exported_by_one_process):
    overrides = [*LAYERS, f"parallelism={layout}"]
    done = fork_ranks(2, ["tests/programs/save_layout.py", str(tmp_path), "none", *overrides], timeout_s=60)
    assert done.returncode == 0, done.stderr[-4000:]
    export(f"checkpoint={tmp_path / 'checkpoints' / 'step_00000001'}", f"out={tmp_path / 'hf'}")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == exported_by_one_process


@pytest.mark.parametrize(
    ("asked", "dtype"), [([], torch.bfloat16), (["dtype=fp32"], torch.float32), (["dtype=fp16"], torch.float16)]
)
def test_weights_have_the_type_that_is_asked_for(asked, dtype, tmp_path):
    with saved_model(tmp_path, *FAMILIES["qwen2"], "trainer.precision=bf16") as saved:
        export(f"checkpoint={saved.path}", f"out={tmp_path / 'hf'}", *asked)
        norms = [layer.input_layernorm.weight.detach() for layer in saved.model.decoder.layers]
    model = load(tmp_path / "hf")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for layer, norm in zip(model.model.layers, norms, strict=True):
        assert torch.equal(layer.input_layernorm.weight, norm.to(dtype))


@pytest.mark.parametrize("recipe", ["delayed", "torchao_rowwise_with_gw_hp"])
def test_scales_of_an_fp8_run_are_left_behind(recipe, tmp_path):
    fp8 = emulate(recipe, "model.vocab_size=256", "trainer.precision=bf16")
    with saved_model(tmp_path, *FAMILIES["llama"], *fp8) as saved:
        export(f"checkpoint={saved.path}", f"out={tmp_path / 'hf'}")
        weight = saved.model.decoder.layers[1].mlp.linear_fc2.weight.detach()
    assert torch.equal(load(tmp_path / "hf").model.layers[1].mlp.down_proj.weight, weight)


def test_the_mean_of_checkpoints_is_written(tmp_path):
    paths, weights = [], []
    for number in range(3):
        seed = f"model.seed={number}"
        save_model(tmp_path / str(number), *FAMILIES["llama"], "trainer.precision=bf16", seed)
        paths.append(tmp_path / str(number) / "checkpoints" / "step_00000001")
        export(f"checkpoint={paths[-1]}", f"out={tmp_path / f'hf{number}'}")
        weights.append(load_file(tmp_path / f"hf{number}" / "model.safetensors"))
    export(f"checkpoint={paths[0]}", f"average=[{paths[1]},{paths[2]}]", f"out={tmp_path / 'mean'}", "dtype=fp32")
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    assert mean.keys() == weights[0].keys()
    for name, tensor in mean.items():
        expected = torch.stack([each[name].double() for each in weights]).mean(0)
        assert torch.equal(tensor, expected.float()), name
        assert name.endswith("norm.weight") or not torch.equal(tensor, weights[0][name].float())


@pytest.mark.parametrize(
    ("other", "named"),
    [(("model.rotary_base=400000",), "model.rotary_base"), (None, "twice"), (("model.num_layers=2",), "num_layers")],
)
def test_only_checkpoints_of_one_model_are_averaged(other, named, llama, tmp_path, capsys):
    path = llama.path
    if other is not None:
        save_model(tmp_path, *FAMILIES["llama"], *other, tokenizer=small_tokenizer())
        path = tmp_path / "checkpoints" / "step_00000001"
    assert main([f"checkpoint={llama.path}", f"average=[{path}]", f"out={tmp_path / 'hf'}"]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert str(path) in told


def test_large_models_come_in_several_files(llama, tmp_path):
    export(f"checkpoint={llama.path}", f"out={tmp_path / 'one'}")
    export(f"checkpoint={llama.path}", f"out={tmp_path / 'many'}", "max_shard_gib=1e-4")
    shards = sorted(tmp_path.glob("many/*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 1e-4 * 2**30 + 8192 for path in shards)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    together = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    alone = load_file(tmp_path / "one" / "model.safetensors")
    assert together.keys() == alone.keys() == index["weight_map"].keys()
    assert all(torch.equal(together[name], alone[name]) for name in alone)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in alone.values())
    tokens = some_tokens(llama.config)
    assert torch.equal(logits_of(tmp_path / "many", tokens), logits_of(tmp_path / "one", tokens))


def test_tokenizer_comes_along(llama, tmp_path):
    export(f"checkpoint={llama.path}", f"out={tmp_path / 'hf'}")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), small_tokenizer()
    text = "def f(value):\n\treturn 'é' + value"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eod
    assert load(tmp_path / "hf").generation_config.eos_token_id == ours.eod


def test_tokenizer_of_another_run_is_not_taken(llama, tmp_path, capsys):
    run = shutil.copytree(llama.path.parents[1], tmp_path / "run")
    path = run / "checkpoints" / llama.path.name
    train_bpe(["another text"], 270).save(run / "tokenizer.json")
    assert main([f"checkpoint={path}", f"out={tmp_path / 'hf'}"]) == 2
    assert "give its file with tokenizer=" in capsys.readouterr().err
    export(f"checkpoint={path}", f"out={tmp_path / 'hf'}", f"tokenizer={llama.path.parents[1] / 'tokenizer.json'}")


def test_damaged_checkpoint_is_refused(llama, tmp_path, capsys):
    path = shutil.copytree(llama.path, tmp_path / "damaged")
    shutil.copy(llama.path.parents[1] / "tokenizer.json", path)
    shard = next(path.glob("*.distcp"))
    flip(shard, 0.5)
    assert main([f"checkpoint={path}", f"out={tmp_path / 'hf'}"]) == 2
    assert f"error: {shard} has changed" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_nothing_is_overwritten(llama, tmp_path, capsys):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    assert main([f"checkpoint={llama.path}", f"out={tmp_path / 'kept'}"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    export(f"checkpoint={llama.path}", f"out={tmp_path / 'empty'}")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert main([f"checkpoint={llama.path}", f"out={tmp_path / 'link'}"]) == 2
    assert f"out={tmp_path / 'link'} is a link" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes.txt"]
    assert (tmp_path / "empty" / "config.json").is_file()


def test_full_disk_is_seen_before_it_is_full(llama, tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 4096, 4096))
    assert main([f"checkpoint={llama.path}", f"out={tmp_path / 'hf'}"]) == 2
    message = capsys.readouterr().err
    assert "needs" in message
    assert "4,096 free" in message
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_of_a_killed_export_is_replaced(llama, tmp_path):
    (tmp_path / ".hf.unfinished").mkdir()
    (tmp_path / ".hf.unfinished" / "model.safetensors").write_bytes(b"half")
    export(f"checkpoint={llama.path}", f"out={tmp_path / 'hf'}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("overrides", "wanted", "message"),
    [
        (
            ["model=gpt2_124m", "model.normalization=rmsnorm"],
            None,
            "model.normalization=rmsnorm is not supported by GPT2LMHeadModel, which has layernorm",
        ),
        (
            ["model=gpt2_124m", "model.num_query_groups=2"],
            None,
            "model.num_query_groups=2 is not supported by GPT2LMHeadModel, which has as many key/value heads as query "
            "heads (model.num_attention_heads=4)",
        ),
        (
            ["model=llama3_8b", "model.num_query_groups=2", "model.rotary_percentage=0.5", "model.bias=true"],
            None,
            "model.bias=true is not supported by Phi3ForCausalLM, which has false",
        ),
        (
            ["model=llama3_8b", "model.num_query_groups=2", "model.activation=gelu"],
            None,
            "model.activation=gelu is not supported by LlamaForCausalLM, which has swiglu",
        ),
        (
            ["model=llama3_8b", "model.num_query_groups=2", "model.final_logit_softcapping=30"],
            None,
            "model.final_logit_softcapping=30.0 is not supported by LlamaForCausalLM, which caps no logits",
        ),
        (
            ["model=mixtral_8x7b", "model.num_query_groups=2"],
            Architecture.llama,
            "model.num_moe_experts=8 is not supported by LlamaForCausalLM, which has null",
        ),
        (
            ["model=llama3_8b", "model.num_query_groups=2"],
            Architecture.mixtral,
            "model.num_moe_experts=null is not supported by MixtralForCausalLM, which has experts",
        ),
        (
            ["model=qwen2_5_7b", "model.num_query_groups=2"],
            Architecture.mistral,
            "model.qkv_bias=true is not supported by MistralForCausalLM, which has false",
        ),
        (
            ["model=qwen2_5_7b", "model.num_query_groups=2"],
            Architecture.llama,
            "model.qkv_bias=true is not supported by LlamaForCausalLM, which has biases in all of attention's "
            "projections or in none (model.bias=false)",
        ),
        (
            ["model=llama3_8b", "model.num_attention_heads=6", "model.num_query_groups=2", "model.kv_channels=16"],
            None,
            "model.hidden_size=64 is not supported by LlamaForCausalLM, which takes multiples of "
            "model.num_attention_heads=6",
        ),
        (
            ["model=qwen2_5_7b", "model.num_query_groups=2", "model.kv_channels=32"],
            None,
            "model.kv_channels=32 is not supported by Qwen2ForCausalLM, whose heads are model.hidden_size / "
            "model.num_attention_heads = 64 / 4 wide",
        ),
    ],
)
def test_what_no_class_says_is_refused_by_its_field(overrides, wanted, message):
    with pytest.raises(ConfigError) as refused:
        choose_architecture(small_config(*overrides).model, wanted)
    assert refused.value.problems == (message,)


def test_checkpoint_that_is_none_is_told(tmp_path, capsys):
    assert main([f"checkpoint={tmp_path}", f"out={tmp_path / 'hf'}"]) == 2
    assert "is not a complete checkpoint of this application" in capsys.readouterr().err
    assert main([f"checkpoint={tmp_path / 'nowhere'}", f"out={tmp_path / 'hf'}"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_memory_is_that_of_a_layer(tmp_path):
    """Of a model of 200 MB in 24 layers, the process takes no quarter, hashing and writing included."""
    done = run_ranks(1, ["tests/programs/export_memory.py", str(tmp_path)])
    assert done.returncode == 0, done.stderr[-4000:]
    num_bytes, grown = map(int, done.stdout.split()[-2:])
    assert num_bytes > 150e6
    assert grown < num_bytes / 4
