"""`gpt_pretrain.translate` from Accelerate and DeepSpeed: its three engines of FP8, and sharding by every name."""

import json

import pytest

from gpt_pretrain.translate.__main__ import main
from gpt_pretrain.translate.formats import FORMATS, Given, format_of
from tests.translations import FOLDER, translate

TE, AO, MS_AMP, ZERO2 = (
    "accelerate_te.yaml",
    "accelerate_fsdp_ao.yaml",
    "accelerate_ms_amp.yaml",
    "deepspeed_zero2.json",
)


def test_transformer_engine(capsys):
    done = translate(capsys, TE)

    assert done.code == 0, done.report
    assert done.choices == {"fp8": "delayed"}
    # torch's DDP overlaps, and shards nothing.
    assert done.keys["model.overlap_grad_reduce"] is True
    assert done.keys["model.fp8_e4m3"] is True
    assert done.keys["trainer.devices"] == 8
    lost = " ".join(done.section("without counterpart"))
    assert "override_linear_precision" in lost
    assert "use_autocast_during_eval" in lost
    assert "#   model: the training script's" in done.text


def test_accelerates_defaults_of_the_recipe(capsys, tmp_path):
    path = tmp_path / "fp8.yaml"
    path.write_text("mixed_precision: fp8\nfp8_config: {backend: TE}\n")
    done = translate(capsys, str(path))

    assert done.keys["model.fp8_amax_compute_algo"] == "most_recent"


def test_torchao_with_sharded_weights(capsys):
    done = translate(capsys, AO)

    assert done.code == 0, done.report
    assert done.choices == {"parallelism": "fsdp", "fp8": "torchao_tensorwise"}
    assert done.keys["model.fp8_params"] is True
    assert (done.keys["trainer.devices"], done.keys["trainer.num_nodes"]) == (8, 2)
    assert done.keys["model.activations_checkpoint_granularity"] == "full"


def test_ms_amp_with_deepspeed(capsys):
    done = translate(capsys, MS_AMP, ZERO2)

    assert done.code == 0, done.report
    assert done.choices == {"parallelism": "zero2", "fp8": "tensorwise"}
    expected = {
        # 8 × 2 × 4 ranks.
        "model.global_batch_size": 64,
        "model.grad_reduce_in_fp32": False,
        "model.optim.use_precision_aware_optimizer": True,
        "model.optim.main_params_dtype": "fp16",
        "model.optim.exp_avg_dtype": "fp8",
        "model.optim.exp_avg_sq_dtype": "fp16",
        "model.optim.sched.name": "linear",
        "model.optim.sched.decay_steps": 1000,
        "trainer.gradient_clip_val": 0.5,
        "trainer.log_every_n_steps": 20,
    }
    assert {key: done.keys.get(key) for key in expected} == expected
    lost = " ".join(done.section("without counterpart"))
    assert "offload_optimizer.device=cpu" in lost
    assert "opt_level=O2" in lost
    assert "warmup_max_lr" in " ".join(done.section("not known from there"))


@pytest.mark.parametrize(
    ("settings", "parallelism"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, "zero2"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "1"}}, "fsdp"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": False}}, "zero2"),
        ({"zero_optimization": {"stage": 1}}, "dp"),
        ({"zero_optimization": {"stage": 3}}, "fsdp"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, None),
    ],
)
def test_sharding_by_every_name(capsys, tmp_path, settings, parallelism):
    path = tmp_path / ("ds.json" if "zero_optimization" in settings else "accelerate.yaml")
    path.write_text(json.dumps(settings))
    done = translate(capsys, str(path))

    assert done.choices.get("parallelism") == parallelism


@pytest.mark.parametrize("files", [[TE], [AO], [MS_AMP, ZERO2]])
def test_every_setting_is_in_a_list(files):
    given = Given(files=[FOLDER / file for file in files], words=[], environment={})
    translation = FORMATS["accelerate"](given)
    texts = "\n".join(translation.texts())
    for file in files:
        for line in (FOLDER / file).read_text().splitlines():
            name, colon, value = line.partition("#")[0].partition(":")
            if colon and value.strip() not in ("", "{") and file.endswith(".yaml"):
                assert name.strip() in texts, line


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("parallelism: {dp: 2}\ntokens: {sequence_length: 8}\noptimizer: {zero_stage: 0}\n", "nanotron"),
        ("model_name: pythia-14m\nout_dir: out\ntrain: {global_batch_size: 4}\n", "litgpt"),
        ("pipe-parallel-size: 1\nmodel-parallel-size: 1\nnum-layers: 12\n", "gpt-neox"),
        ("model: {_target_: megatron.bridge.models.x}\nddp: {bucket_size: 1}\n", "megatron-bridge"),
    ],
)
def test_a_file_tells_its_program(tmp_path, text, program):
    path = tmp_path / "other.yaml"
    path.write_text(text)

    assert format_of(Given(files=[path], words=[], environment={})) == program


def test_what_is_not_translated_is_refused_by_name(capsys, tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("language_model: {num_layers: 2}\nmodel_parallel: {tensor_model_parallel_size: 1}\n")

    assert main([str(path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "--yaml-cfg" in message


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing to translate"),
        (["--from"], "--from has no value"),
        (["--from", "keras", "x.yaml"], "--from keras"),
        (["--env", "A", "x.sh"], "--env A"),
        (["missing.yaml"], "missing.yaml"),
        (["missing.sh"], "missing.sh"),
        ([str(FOLDER / TE), "x=1"], "x=1"),
        (["--env", "WORLD_SIZE=x", str(FOLDER / "torchtitan_debug_model.toml")], "WORLD_SIZE=x"),
    ],
)
def test_what_was_given_wrongly_is_told(capsys, words, told):
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert told in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "a: &a [1]\nb: *c\n"),
        ("a.yaml", "- 1\n"),
        ("a.yaml", "a: !!python/object/apply:os.system [echo]\n"),
        ("a.toml", "a = \n"),
        ("a.json", "{"),
        ("a.sh", "echo nothing\n"),
        ("a.yaml", "hello: 1\n"),
    ],
)
def test_files_that_are_none_of_these_are_refused(capsys, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
