"""Published models come in as they are: bit for bit out again, and with the logits of `transformers` in a run."""

import json
import math
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gpt_pretrain.checkpoint.load import load_weights, verify_checkpoint
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.source import Source
from gpt_pretrain.export import main as export_main
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.huggingface.architectures import Architecture
from gpt_pretrain.huggingface.published_config import NOT_HERE, from_hf_config
from gpt_pretrain.import_hf import main
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.rules.jobs import load_config
from tests.forked_runs import fork_ranks
from tests.saved_models import build_trainable, small_tokenizer, weights_in
from tests.transformers_reference import (
    RESCALED_ROPE,
    Case,
    build_reference,
    gpt2,
    llama,
    make_tokens,
    reference_logits,
)

# For contexts beyond 16 tokens, in sequences of 32; heads of 16 rotate slowly enough for all parts of the ramp.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Of 8 tokens, itself included, in sequences of 32.
WINDOW = {"sliding_window": 8}
SLIDING = "sliding_attention"
# By the class that publishes them, and what is special; 250 tokens are padded to 256 rows.
CASES = {
    "gpt2": gpt2("gpt2_124m", vocab_size=250),
    "llama": llama("llama3_8b", "Llama", groups=2, theta=5e5, epsilon=1e-5, vocab_size=250),
    "mistral": llama("mistral_7b", "Mistral", groups=2, theta=1e6, epsilon=1e-5, head_width=24),
    "qwen2": llama("qwen2_5_7b", "Qwen2", groups=2, theta=1e6, epsilon=1e-6),
    "qwen3": llama("qwen3_8b", "Qwen3", groups=2, theta=1e6, epsilon=1e-6, head_width=24),
    "phi3": llama("phi4", "Phi3", groups=2, theta=2.5e5, epsilon=1e-5, rope={"partial_rotary_factor": 0.5}),
    "mixtral": llama("mixtral_8x7b", "Mixtral", groups=2, theta=1e6, epsilon=1e-5, experts={"num_local_experts": 4}),
    "qwen3_moe": llama(
        "qwen3_30b_a3b",
        "Qwen3Moe",
        groups=2,
        theta=1e6,
        epsilon=1e-6,
        head_width=24,
        experts={"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "smollm3": llama(
        "smollm3_3b", "SmolLM3", groups=2, theta=2e6, epsilon=1e-6, head_width=24, experts={"no_rope_layer_interval": 2}
    ),
    "starcoder2": Case(
        preset="gpt2_124m",
        architecture="Starcoder2",
        published={"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "tie_word_embeddings": False},
        groups=2,
        vocab_size=250,
    ),
    "starcoder2, no biases": Case(
        preset="gpt2_124m",
        architecture="Starcoder2",
        published={"hidden_act": "gelu", "use_bias": False, "tie_word_embeddings": False},
        groups=2,
    ),
    "gpt_neox": Case(
        preset="gpt2_124m",
        architecture="GPTNeoX",
        published={"use_parallel_residual": False, "rotary_emb_base": 2e4, "rotary_pct": 0.25},
        vocab_size=250,
    ),
    "mistral, window": llama("mistral_7b", "Mistral", groups=2, theta=1e6, epsilon=1e-5, experts=WINDOW),
    "qwen2, window": llama(
        "qwen2_5_7b",
        "Qwen2",
        layers=3,
        groups=2,
        theta=1e6,
        epsilon=1e-6,
        experts={**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3, window": llama(
        "qwen3_8b",
        "Qwen3",
        layers=3,
        groups=2,
        theta=1e6,
        epsilon=1e-6,
        experts={**WINDOW, "use_sliding_window": True, "layer_types": [SLIDING, "full_attention", SLIDING]},
    ),
    "qwen3, window in all layers": llama(
        "qwen3_8b",
        "Qwen3",
        groups=2,
        theta=1e6,
        epsilon=1e-6,
        experts={**WINDOW, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "phi3, window": llama("phi4", "Phi3", groups=2, theta=2.5e5, epsilon=1e-5, experts=WINDOW),
    "mixtral, window": llama(
        "mixtral_8x7b", "Mixtral", groups=2, theta=1e6, epsilon=1e-5, experts={"num_local_experts": 4, **WINDOW}
    ),
    "qwen3_moe, window": llama(
        "qwen3_30b_a3b",
        "Qwen3Moe",
        groups=2,
        theta=1e6,
        epsilon=1e-6,
        experts={
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            **WINDOW,
        },
    ),
    "smollm3, window": llama(
        "smollm3_3b",
        "SmolLM3",
        groups=2,
        theta=2e6,
        epsilon=1e-6,
        experts={"no_rope_layer_interval": 2, "use_sliding_window": True, **WINDOW},
    ),
    "starcoder2, window": Case(
        preset="gpt2_124m", architecture="Starcoder2", published={"tie_word_embeddings": False, **WINDOW}, groups=2
    ),
    "qwen2, yarn": llama("qwen2_5_7b", "Qwen2", groups=2, theta=1e4, epsilon=1e-6, rope=YARN),
    "qwen3, yarn and window": llama(
        "qwen3_8b",
        "Qwen3",
        groups=2,
        theta=1e2,
        epsilon=1e-6,
        head_width=24,
        rope={**YARN, "original_max_position_embeddings": 256},
        experts={**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "llama, rescaled rope": llama("llama3_1_8b", "Llama", groups=2, theta=5e5, epsilon=1e-5, rope=RESCALED_ROPE),
}
SMALL_BATCH = ("model.micro_batch_size=2", "model.global_batch_size=2")


def import_model(path, out):
    assert main([f"path={path}", f"out={out}"]) == 0


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The directory of each model as `transformers` saves it."""
    folder = tmp_path_factory.mktemp("published")
    for name, case in CASES.items():
        build_reference(case).save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_import_and_export_give_every_bit_back(name, dtype, published, tmp_path):
    transformers.AutoModelForCausalLM.from_pretrained(published / name, dtype=dtype).save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "ours")
    architecture = name.partition(",")[0]
    arguments = [f"checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'back'}", f"architecture={architecture}"]
    assert export_main(arguments) == 0
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("hf", "back"))
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(before[key], after[key]) for key in before)
    # And what is said of them.
    says, said = (transformers.AutoConfig.from_pretrained(tmp_path / part).to_dict() for part in ("back", "hf"))
    # Where the files lie; widths that follow from others; dropout, which belongs to training.
    apart = ("_name_or_path", "transformers_version", "n_inner", "head_dim", "embd_pdrop", "resid_pdrop", "attn_pdrop")
    assert {key: value for key, value in said.items() if says.get(key) != value and key not in apart} == {}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_starts_from_it_computes_what_transformers_does(name, published, tmp_path):
    case = CASES[name]
    import_model(published / name, tmp_path / "ours")
    install_cpu_device()
    config = load_config(["experiment=imported", "data=mock", *SMALL_BATCH], Source(config_dir=tmp_path / "ours"))
    assert config.checkpoint.init_from == str(tmp_path / "ours")
    with process_groups(config.model, read_launch({}), detect_platform()):
        trainable = build_trainable(config)
        load_weights(verify_checkpoint(tmp_path / "ours"), trainable, config, {})
        tokens = make_tokens(case)
        positions = torch.arange(case.length).expand_as(tokens)
        with torch.no_grad():
            logits = trainable.model.gpt_chunks[0].eval()(tokens, positions, None)
            losses = trainable.model.gpt_chunks[0](tokens, positions, None, labels=tokens.roll(-1, dims=1))
    expected = reference_logits(build_reference(case), case)
    torch.testing.assert_close(logits[..., : case.vocab_size], expected, atol=1e-4, rtol=0.0)
    # Rows that pad the vocabulary take next to nothing of the probability.
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens.roll(-1, dims=1).flatten())
    num_padding = logits.size(-1) - case.vocab_size
    assert -1e-4 < losses.mean() - loss < math.log1p(num_padding / case.vocab_size) + 1e-4


@pytest.mark.parametrize(
    ("name", "changed"),
    [("mistral", {"sliding_window": CASES["mistral"].length}), ("llama", {"quantization_config": None})],
)
def test_what_changes_nothing_is_imported(name, changed, published, tmp_path):
    """A window as long as the longest sequence hides nothing, and null quantizes nothing."""
    shutil.copytree(published / name, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    import_model(tmp_path / "hf", tmp_path / "ours")


def test_training_goes_on_with_its_weights_and_its_tokenizer(published, tmp_path):
    hf, out = tmp_path / "hf", tmp_path / "start"
    tokenizer = small_tokenizer()
    case = llama("llama3_8b", "Llama", groups=2, theta=5e5, epsilon=1e-5, vocab_size=300)
    build_reference(case).save_pretrained(hf)
    tokenizer.save(hf / "tokenizer.json")
    import_model(hf, out)
    (tmp_path / "text.txt").write_text("def function(value):\n    return value\n" * 300)
    # What the command prints as the way to go on, with less to do.
    arguments = ["--config-dir", str(out), "experiment=imported", "data=text", f"run_dir={tmp_path / 'run'}"]
    data = [f"model.data.text_files=[{tmp_path / 'text.txt'}]", f"model.data.cache_dir={tmp_path / 'cache'}"]
    short = [
        "trainer.max_steps=2",
        "trainer.log_every_n_steps=1",
        "trainer.limit_val_batches=0",
        "sample.max_new_tokens=0",
    ]
    only_training = ["model.data.splits_string='1,0,0'", "logging.tensorboard=false", "model.optim.lr=1e-4"]
    done = fork_ranks(1, ["-m", "gpt_pretrain", *arguments, *data, *short, *only_training, *SMALL_BATCH], timeout_s=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    metrics = load_metrics(tmp_path / "run")
    assert [record.step for record in metrics.train] == [1, 2]
    assert (tmp_path / "run" / "tokenizer.json").read_text() == tokenizer.to_json()
    # Random weights of this width are far from the uniform distribution that fresh ones give.
    assert abs(metrics.train[0].loss - math.log(384)) > 0.5


@pytest.mark.parametrize("name", ["smollm3", "starcoder2", "gpt_neox"])
def test_what_has_trained_on_goes_out_again(name, published, tmp_path):
    import_model(published / name, tmp_path / "start")
    arguments = ["--config-dir", str(tmp_path / "start"), "experiment=imported", f"run_dir={tmp_path / 'run'}"]
    short = ["data=mock", "trainer.max_steps=1", "trainer.limit_val_batches=0", "logging.tensorboard=false"]
    done = fork_ranks(1, ["-m", "gpt_pretrain", *arguments, *short, "model.optim.lr=1e-3", *SMALL_BATCH], timeout_s=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    asked = ["dtype=fp32", f"architecture={name}"]
    assert export_main([f"checkpoint={checkpoint}", f"out={tmp_path / 'back'}", *asked]) == 0
    import_model(tmp_path / "back", tmp_path / "again")
    before, after = weights_in(tmp_path / "start"), weights_in(tmp_path / "again")
    trained = weights_in(checkpoint)
    assert before.keys() == after.keys() == trained.keys()
    tokens = CASES[name].vocab_size
    for key, tensor in after.items():
        # The rows that pad the vocabulary do not go out.
        rows = slice(tokens) if tensor.size(0) > tokens else slice(None)
        assert torch.equal(tensor[rows], trained[key][rows]), key
    key = "decoder.layers.mlp.linear_fc2.weight"
    assert not torch.equal(before[key], after[key])


def test_gpt2_is_read_as_it_is_published(published, tmp_path):
    """Its files name no `transformer.`, and hold the causal masks."""
    source = load_file(published / "gpt2" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in source.items()}
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32).tril() for layer in range(2)}
    (tmp_path / "hf").mkdir()
    save_file(bare, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_bytes((published / "gpt2" / "config.json").read_bytes())
    import_model(tmp_path / "hf", tmp_path / "ours")
    assert export_main([f"checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'back'}"]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], source[name]) for name in source)


def test_sharded_files_are_read_through_their_index(published, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(published / "llama")
    model.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    import_model(tmp_path / "hf", tmp_path / "ours")
    assert export_main([f"checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'back'}"]) == 0
    back, source = (load_file(tmp_path / "back" / "model.safetensors"), model.state_dict())
    assert all(torch.equal(back[name], source[name]) for name in back)


@pytest.fixture
def changed(published, tmp_path):
    """A published Llama in BF16 with some of its tensors changed; answers with its directory and the tensors."""

    def change(suffix, values):
        source = load_file(published / "llama" / "model.safetensors")
        tensors = {name: values(each) if name.endswith(suffix) else each.bfloat16() for name, each in source.items()}
        (tmp_path / "hf").mkdir(exist_ok=True)
        save_file(tensors, tmp_path / "hf" / "model.safetensors")
        (tmp_path / "hf" / "config.json").write_bytes((published / "llama" / "config.json").read_bytes())
        return tmp_path / "hf", tensors

    return change


def test_types_that_a_model_mixes_are_kept(changed, tmp_path, capsys):
    path, tensors = changed("norm.weight", lambda norm: norm + 1e-6)
    import_model(path, tmp_path / "ours")
    assert export_main([f"checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'back'}"]) == 0
    assert "in bfloat16, float32" in capsys.readouterr().out
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {tensor.dtype for tensor in back.values()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in tensors)


@pytest.mark.parametrize("suffix", ["layers.0.self_attn.k_proj.weight", "layers.1.mlp.down_proj.weight"])
def test_types_that_one_tensor_would_mix_are_refused(suffix, changed, tmp_path, capsys):
    path, _ = changed(suffix, lambda weight: weight)
    assert main([f"path={path}", f"out={tmp_path / 'ours'}"]) == 2
    told = capsys.readouterr().err
    assert f"{suffix} in F32" in told
    assert "in BF16" in told


def test_a_weight_that_fp16_does_not_reach_is_refused(changed, tmp_path, capsys):
    path, _ = changed("layers.1.mlp.up_proj.weight", lambda weight: torch.full_like(weight, 2**17).bfloat16())
    import_model(path, tmp_path / "ours")
    arguments = [f"checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'back'}"]
    assert export_main([*arguments, "dtype=fp16"]) == 2
    assert "layers.1.mlp.up_proj.weight has values up to 1.31e+05" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
    assert export_main([*arguments, "dtype=fp32"]) == 0


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("qwen2, window", {"layer_types": [SLIDING]}, "layer_types=['sliding_attention'] cannot be imported"),
        ("qwen2, window", {"layer_types": ["chunked_attention"] * 3}, "full_attention or sliding_attention"),
        ("qwen2, window", {"layer_types": [[SLIDING]] * 3}, "full_attention or sliding_attention"),
        ("mistral", {"sliding_window": 0}, "model.window_size=[-1, 0]"),
        (
            "llama",
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "cannot be imported: rope is stretched here as in Llama 3.1",
        ),
        ("qwen2, yarn", {"rope_parameters": {**YARN, "rope_theta": 1e6, "attention_factor": 1.0}}, "attention_factor"),
        ("qwen2, yarn", {"rope_parameters": {**YARN, "rope_theta": 1e6, "beta_fast": 16}}, "beta_fast"),
        ("phi3", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "longrope"),
        ("gpt_neox", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "model.rotary_percentage=0.5"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 8.0}}, "or by YaRN"),
        (
            "llama, rescaled rope",
            {"rope_parameters": {**RESCALED_ROPE, "rope_theta": 5e5, "low_freq_factor": 2.0}},
            "low_freq_factor=1.0",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "this class rotates whole heads"),
        ("qwen3", {"attention_bias": True}, "attention_bias=true cannot be imported"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 cannot be imported"),
        ("mixtral", {"num_experts_per_tok": 1}, "model.moe_router_topk=1"),
        ("mixtral", {"num_local_experts": 5, "num_experts": 5}, "lacks model.layers.0.block_sparse_moe.experts.4.w1"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=false cannot be imported"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 cannot be imported"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0] cannot be imported"),
        ("smollm3", {"no_rope_layers": [0, 1]}, "no_rope_layers=[0, 1] cannot be imported: every n-th"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=[1] cannot be imported: it has a number for each layer"),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 4},
            "model.num_layers=2 is not divisible by model.no_rope_freq=4",
        ),
        ("starcoder2", {"hidden_act": "relu"}, "hidden_act='relu' cannot be imported"),
        ("gpt_neox", {"use_parallel_residual": True}, "use_parallel_residual=true cannot be imported"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias=false cannot be imported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' cannot be imported"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true cannot be imported"),
        ("llama", {"quantization_config": {"bits": 4}}, "cannot be imported: import the model's unquantized weights"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"num_hidden_layers": 3}, "it lacks model.layers.2.input_layernorm.weight"),
        ("llama", {"num_hidden_layers": 1}, "has model.layers.1."),
        ("llama", {"intermediate_size": 95}, "has model.layers.0.mlp.gate_proj.weight as [96, 64] instead of [95, 64]"),
        ("llama", {"rms_norm_eps": 0}, "model.layernorm_epsilon=0.0 is not positive"),
        ("llama", {"num_key_value_heads": 3}, "is not divisible by model.num_query_groups=3"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu' cannot be imported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true cannot be imported"),
        (
            "gpt2",
            {"model_type": "bert"},
            "model_type='bert' cannot be imported; known: gpt2, llama, mistral, qwen2, qwen3, phi3, mixtral, "
            "qwen3_moe, smollm3, starcoder2, gpt_neox",
        ),
    ],
)
def test_what_would_not_be_the_same_model_is_refused(  # noqa: PLR0917 - a table's columns and pytest's fixtures
    name, changed, message, published, tmp_path, capsys
):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").symlink_to(published / name / "model.safetensors")
    config = json.loads((published / name / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | changed))
    assert main([f"path={tmp_path / 'hf'}", f"out={tmp_path / 'ours'}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("model_type", NOT_HERE)
def test_a_model_that_no_layer_here_computes_is_refused_by_what_it_has(model_type):
    config = transformers.AutoConfig.for_model(model_type)
    part, why = NOT_HERE[model_type]
    assert f"model_type='{model_type}' cannot be imported: {why} ({part})" in read(config.to_dict())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert part in config.to_dict() or any(part in name.split(".") for name, _ in model.named_parameters())


def read(values):
    """The fields of a config.json, or why it is refused."""
    try:
        return from_hf_config(values, "config.json")[1]
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("architecture", Architecture)
def test_a_field_that_is_left_out_means_what_transformers_takes_for_it(architecture):
    # Weights that do not add up are refused.
    whole = transformers.AutoConfig.for_model(architecture.name).to_dict() | {"norm_topk_prob": True}
    whole |= {"use_parallel_residual": False}
    expected = read(whole)
    for name in whole.keys() - {"model_type"}:
        fields = read({key: value for key, value in whole.items() if key != name})
        if isinstance(fields, str):
            assert f"{name} is missing" in fields or f"{name}, left out, is " in fields
            continue
        if name == "head_dim" and expected["kv_channels"] is not None:
            fields["kv_channels"] = fields["hidden_size"] // fields["num_attention_heads"]
        assert fields == expected, name


def test_directory_without_safetensors_is_told(published, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((published / "llama" / "config.json").read_bytes())
    assert main([f"path={tmp_path}", f"out={tmp_path / 'ours'}"]) == 2
    assert "holds neither model.safetensors nor model.safetensors.index.json" in capsys.readouterr().err
    assert main([f"path={tmp_path / 'nowhere'}", f"out={tmp_path / 'ours'}"]) == 2
    assert "config.json does not exist" in capsys.readouterr().err
