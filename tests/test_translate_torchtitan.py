"""`gpt_pretrain.translate` from torchtitan: values worked out by hand."""

import tomllib

import pytest

from gpt_pretrain.translate.formats import FORMATS, Given
from gpt_pretrain.translate.structured_files import flat
from tests.translations import FOLDER, translate

OLD, NEW, DEBUG = "torchtitan_llama3_8b_2024.toml", "torchtitan_llama3_70b_2025.toml", "torchtitan_debug_model.toml"


def test_llama3_8b_of_2024(capsys):
    done = translate(capsys, "--env", "WORLD_SIZE=8", OLD)

    assert done.code == 0, done.report
    assert done.choices == {"model": "llama3_8b", "parallelism": "fsdp", "fp8": "torchao_tensorwise"}
    assert done.keys == {
        "name": "torchtitan_llama3_8b_2024",
        # 1 × 8 data-parallel ranks.
        "model.global_batch_size": 8,
        "model.seed": 2020,
        "model.fp8_params": True,
        "model.activations_checkpoint_granularity": "full",
        "model.activations_checkpoint_method": "uniform",
        "model.activations_checkpoint_num_layers": 1,
        "model.optim.sched.name": "linear",
        "model.optim.sched.warmup_steps": 200,
        "model.optim.sched.min_lr": 0,
        "trainer.devices": 8,
        "trainer.num_nodes": 1,
        "trainer.precision": "bf16",
        "trainer.max_steps": 1000,
        "trainer.limit_val_batches": 0,
        "trainer.gc_interval": 50,
        # 900 seconds.
        "checkpoint.save_interval_minutes": 15,
        "checkpoint.keep_last": 10,
    }


def test_llama3_70b_of_2025(capsys):
    done = translate(capsys, "--env", "WORLD_SIZE=64", NEW)

    assert done.code == 0, done.report
    assert done.choices == {"model": "llama3_70b", "parallelism": "fsdp", "fp8": "torchao_rowwise"}
    expected = {
        "model.tensor_model_parallel_size": 8,
        # torchtitan's TP always splits the sequence.
        "model.sequence_parallel": True,
        "model.num_distributed_optimizer_instances": 2,
        "model.micro_batch_size": 8,
        "model.global_batch_size": 512,
        # wk and wv are a part of it, and the LM head never multiplies in FP8.
        "model.fp8_exclude": ["*.linear_qkv"],
        "model.optim.sched.name": "wsd",
        "model.optim.sched.wsd_decay_steps": 800,
        "model.optim.sched.wsd_decay_style": "cosine",
        # 1.5e-4 × 0.1
        "model.optim.sched.min_lr": 1.5e-5,
        "trainer.limit_val_batches": 50,
        "trainer.val_check_interval": 500,
        "checkpoint.save_at_end": False,
    }
    assert {key: done.keys.get(key) for key in expected} == expected
    assert "selective_ac_option=op" in " ".join(done.section("without counterpart"))


def test_the_debug_model(capsys):
    done = translate(capsys, "--env", "WORLD_SIZE=4", DEBUG, "--training.steps=20", "--training.seq_len", "256")

    assert done.code == 0, done.report
    assert (done.keys["model.hidden_size"], done.keys["model.ffn_hidden_size"]) == (256, 768)
    # Of 4 ranks 2 are stages.
    assert done.keys["model.global_batch_size"] == 16
    assert done.keys["model.micro_batch_size"] == 2
    assert (done.keys["trainer.max_steps"], done.keys["model.encoder_seq_length"]) == (20, 256)
    assert done.keys["model.optim.sched.wsd_decay_steps"] == 16


def test_processes_that_nobody_knows_are_up_to_the_user(capsys):
    done = translate(capsys, NEW, "--training.global_batch_size=-1")

    assert "model.global_batch_size" not in done.keys
    assert "--env WORLD_SIZE=" in " ".join(done.section("not known from there"))


def test_a_model_without_a_preset_never_becomes_another_one(capsys):
    done = translate(capsys, OLD, "--model.name=deepseek_v3", "--model.flavor=671B")

    assert done.code == 3
    assert done.choices["model"] == "base"
    assert "model.num_layers" in " ".join(done.section("our own check refuses"))


def test_options_alone(capsys):
    done = translate(capsys, "--from", "torchtitan", "--training.steps=10", "--parallelism.tensor_parallel_degree=2")

    assert done.keys["trainer.max_steps"] == 10
    assert done.keys["model.tensor_model_parallel_size"] == 2
    assert "model.optim.lr" not in done.keys


@pytest.mark.parametrize("file", [OLD, NEW, DEBUG])
def test_every_setting_is_in_a_list(file):
    path = FOLDER / file
    translation = FORMATS["torchtitan"](Given(files=[path], words=["--model.new_key=3"], environment={}))
    texts = "\n".join(translation.texts())
    for name in [*flat(tomllib.loads(path.read_text())), "model.new_key"]:
        assert f"{name}=" in texts
