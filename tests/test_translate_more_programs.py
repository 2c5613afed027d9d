"""`gpt_pretrain.translate` from nanotron, litgpt, GPT-NeoX and Megatron-Bridge: values worked out by hand."""

import pytest

from gpt_pretrain.translate.formats import FORMATS, Given
from gpt_pretrain.translate.structured_files import flat, read_values
from tests.translations import FOLDER, translate

NANOTRON, LITGPT = "nanotron_llama_wsd.yaml", "litgpt_small_llama.yaml"
NEOX, BRIDGE = "gpt_neox_gated.yaml", "megatron_bridge_run_config.yaml"


def expect(done, expected):
    """The keys of the experiment and their values."""
    assert {key: done.keys.get(key) for key in expected} == expected


def test_nanotron(capsys):
    done = translate(capsys, "--env", "WORLD_SIZE=16", NANOTRON)

    assert done.code == 0, done.report
    assert done.choices == {"model": "base"}
    expect(
        done,
        {
            "model.num_layers": 20,
            "model.num_query_groups": 8,
            "model.ffn_hidden_size": 2816,
            # Weights begin with init_method.std; initializer_range is not read.
            "model.init_method_std": 0.03,
            # 64 × 2 ranks: 50,304 rows, which 64 alone gives, too.
            "model.make_vocab_size_divisible_by": 64,
            "model.z_loss_coeff": 0.0002,
            # 4 × 2 × 8 replicas.
            "model.global_batch_size": 64,
            "model.sequence_parallel": True,
            "model.use_distributed_optimizer": True,
            "model.optim.sched.name": "wsd",
            "model.optim.sched.warmup_steps": 400,
            # The decay begins at step 8,000 and lasts 2,000.
            "model.optim.sched.decay_steps": 10_000,
            "model.optim.sched.wsd_decay_steps": 2000,
            "model.optim.sched.wsd_decay_style": "minus_sqrt",
            "trainer.val_check_interval": 400,
            "trainer.limit_val_batches": 4,
            "checkpoint.save_interval": 500,
            "model.data.num_workers": 2,
        },
    )
    lost = " ".join(done.section("without counterpart"))
    assert "step 9000" in lost
    assert "tokenized/web" in " ".join(done.section("not known from there"))


@pytest.mark.parametrize(
    ("change", "value", "expected"),
    [
        # The decay follows the warmup where no step is given, and ends where the run does.
        ("optimizer.learning_rate_scheduler.lr_decay_starting_step", None, {"decay_steps": 2400, "name": "wsd"}),
        ("optimizer.learning_rate_scheduler.lr_decay_style", "linear", {"decay_steps": 10_000, "name": "wsd"}),
    ],
)
def test_nanotrons_decay(change, value, expected):
    words = [f"--{change}={'null' if value is None else value}"]
    translation = FORMATS["nanotron"](Given(files=[FOLDER / NANOTRON], words=words, environment={}))
    sched = {key: translation.settings[f"model.optim.sched.{key}"].value for key in expected}
    assert sched == expected


def test_nanotrons_experts_are_another_model(capsys):
    done = translate(capsys, NANOTRON, "--model.model_config.moe_config.num_experts=4")

    assert done.keys["model.moe_ffn_hidden_size"] == 1408
    assert "softmax came before" in " ".join(done.section("without counterpart"))
    done = translate(capsys, NANOTRON, "--model.model_config.moe_config.enable_shared_expert=true")
    assert done.code == 3


def test_litgpt(capsys):
    done = translate(capsys, LITGPT)

    assert done.code == 0, done.report
    assert done.choices == {"model": "base", "parallelism": "fsdp"}
    expect(
        done,
        {
            "model.num_layers": 8,
            "model.hidden_size": 512,
            "model.ffn_hidden_size": 1408,
            "model.vocab_size": 32000,
            "model.share_embeddings_and_output_weights": True,
            # sqrt(2 / 5 / 512).
            "model.init_method_std": 0.0279508,
            "model.max_position_embeddings": 1024,
            "model.encoder_seq_length": 512,
            "model.optim.betas": [0.9, 0.98],
            "model.optim.sched.warmup_steps": 150,
            "model.optim.sched.min_lr": 3e-5,
            # 1,000,000,000 // (128 × 512).
            "trainer.max_steps": 15258,
            "trainer.devices": 4,
            "trainer.num_nodes": 2,
            # 40 microbatches of 8 samples on 8 ranks are 20 batches.
            "trainer.limit_val_batches": 20,
            "trainer.gradient_clip_val": 0.5,
            "model.num_distributed_optimizer_instances": 2,
            "checkpoint.save_interval": 200,
        },
    )
    lost = " ".join(done.section("without counterpart"))
    # 1 / (sqrt(512) × 8) there, 0.0279508 / sqrt(16) here.
    assert "0.005524" in lost
    assert "0.006988" in lost
    assert "autocast" in lost


@pytest.mark.parametrize(
    ("name", "preset", "layers"),
    [("Llama-3-8B", "llama3_8b", None), ("tiny-llama-1.1b", "base", 22), ("pythia-14m", "base", None)],
)
def test_litgpts_names(capsys, tmp_path, name, preset, layers):
    path = tmp_path / "pretrain.yaml"
    path.write_text(f"model_name: {name}\nout_dir: out\ntrain: {{max_seq_length: 1024}}\n")
    done = translate(capsys, str(path))

    assert done.choices.get("model") == preset
    assert done.keys.get("model.num_layers") == layers
    # litgpt's defaults: 3e12 // (512 × 1,024).
    assert done.keys["trainer.max_steps"] == 5722045
    assert done.code == (3 if name == "pythia-14m" else 0), done.report


def test_litgpt_of_2024(capsys, tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text(
        "model: {n_layer: 4, n_head: 8, n_embd: 256, block_size: 512, parallel_residual: true}\n"
        "train: {learning_rate: 6e-4, beta1: 0.8, beta2: 0.9}\nout_dir: out\n"
    )
    done = translate(capsys, str(path))

    expect(done, {"model.num_layers": 4, "model.optim.lr": 6e-4, "model.optim.betas": [0.8, 0.9]})
    # 50,254 tokens in multiples of 512, and four times the hidden size.
    expect(done, {"model.vocab_size": 50688, "model.rotary_percentage": 0.25, "model.activation": "gelu"})
    assert done.code == 3
    assert "parallel_residual" in " ".join(done.section("our own check refuses"))


def test_gpt_neox(capsys, tmp_path):
    cluster = tmp_path / "cluster.yml"
    cluster.write_text('{"log-interval": 50, "use_wandb": true}')
    done = translate(capsys, "--env", "WORLD_SIZE=16", NEOX, str(cluster))

    assert done.code == 0, done.report
    # ZeRO 1.
    assert done.choices == {"model": "base", "parallelism": "dp", "data": "mmap"}
    expect(
        done,
        {
            # Two thirds of 8,192 are 5,461; half of them in multiples of 256.
            "model.ffn_hidden_size": 2816,
            "model.num_query_groups": 4,
            "model.rotary_percentage": 0.5,
            "model.vocab_size": 50257,
            # 50,304 rows either way.
            "model.make_vocab_size_divisible_by": 64,
            "model.layernorm_epsilon": 1e-6,
            # sqrt(2 / (5 × 1,024)).
            "model.init_method_std": 0.0197642,
            # 4 × 3 × 8 data-parallel ranks.
            "model.global_batch_size": 96,
            "model.tensor_model_parallel_size": 2,
            "model.activations_checkpoint_num_layers": 2,
            "model.optim.weight_decay": 0.05,
            "model.optim.sched.warmup_steps": 360,
            "model.optim.sched.decay_steps": 18_000,
            "model.data.data_prefix": ["data/web_text_document"],
            "model.data.splits_string": "969,30,1",
            "trainer.max_steps": 20_000,
            "trainer.gradient_clip_val": 0.7,
            # Of the second file.
            "trainer.log_every_n_steps": 50,
            "checkpoint.save_interval": 1000,
            "checkpoint.keep_last": 3,
        },
    )
    assert not any("bias" in line for line in done.section("without counterpart"))
    # 2 / 12 / sqrt(1,024).
    assert "0.005208" in " ".join(done.section("without counterpart"))
    assert "below min_lr" in " ".join(done.section("read with care"))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("--gpt_j_residual=true", "side by side"),
        ("--pos_emb=alibi", "positions were alibi"),
        ("--activation=geglu", "activation"),
        ("--norm=non_parametric_layernorm", "norm"),
        ("--attention_config=[[[local],12]]", "attended"),
    ],
)
def test_gpt_neoxs_other_models(capsys, setting, told):
    done = translate(capsys, NEOX, setting)

    assert done.code == 3
    assert told in " ".join(done.section("without counterpart"))


def test_megatron_bridge(capsys):
    done = translate(capsys, "--env", "WORLD_SIZE=8", BRIDGE)

    assert done.code == 0, done.report
    assert done.choices == {"model": "base", "parallelism": "dp", "fp8": "delayed", "data": "mmap"}
    expect(
        done,
        {
            "model.num_layers": 24,
            "model.ffn_hidden_size": 5632,
            "model.num_query_groups": 8,
            "model.rope_scaling_factor": 8.0,
            "model.rotary_base": 500000,
            "model.max_position_embeddings": 8192,
            "model.encoder_seq_length": 2048,
            "model.init_method_std": 0.01,
            # The precision's section counts for the model's and DDP's.
            "model.fp8_amax_history_len": 512,
            "model.fp8_params": True,
            "model.grad_reduce_in_fp32": False,
            "model.data.data_prefix": [0.7, "data/web_text_document", 0.3, "data/code_text_document"],
            "model.optim.eps": 1e-5,
            "model.optim.sched.decay_steps": 4000,
            "model.optim.sched.warmup_steps": 300,
            "checkpoint.save_interval": 250,
            "checkpoint.keep_last": 2,
            "trainer.max_steps": 4000,
            "model.seed": 5,
        },
    )
    assert done.section("without counterpart") == []


def test_megatron_bridges_overrides_are_translated_alone(capsys, tmp_path):
    path = tmp_path / "override.yaml"
    path.write_text("model: {seq_length: 4096}\ntrain: {train_iters: 20, global_batch_size: 24}\n")
    done = translate(capsys, "--from", "megatron-bridge", str(path))

    assert done.keys == {
        "name": "override",
        "model.max_position_embeddings": 4096,
        "model.global_batch_size": 24,
        "trainer.max_steps": 20,
    }


@pytest.mark.parametrize(
    ("file", "format"), [(NANOTRON, "nanotron"), (LITGPT, "litgpt"), (NEOX, "gpt-neox"), (BRIDGE, "megatron-bridge")]
)
def test_every_setting_is_in_a_list(file, format):
    values = {**flat(read_values(FOLDER / file)), "new_key": 3}
    translation = FORMATS[format](Given(files=[FOLDER / file], words=["--new_key=3"], environment={}))
    texts = "\n".join(translation.texts())

    for name, value in values.items():
        assert f"{name.replace('-', '_')}=" in texts.replace("-", "_"), (name, value)
    assert any("new_key" in each.setting for each in translation.lost)
