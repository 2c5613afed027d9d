"""`gpt_pretrain.translate` from NeMo 1.x: values worked out by hand."""

import pytest

from gpt_pretrain.translate.formats import FORMATS, Given
from tests.nemo import NEMO_FP8_WITH_TE
from tests.translations import FOLDER, translate

GPT, LLAMA = "nemo_megatron_gpt_config.yaml", "nemo_megatron_llama_config.yaml"


def test_megatron_gpt_config_with_overrides(capsys):
    overrides = ("trainer.devices=8", "model.global_batch_size=256", *NEMO_FP8_WITH_TE)
    done = translate(capsys, "--from", "nemo", GPT, *overrides)

    assert done.code == 0, done.report
    assert done.choices == {"model": "gpt2_124m", "fp8": "delayed", "data": "mmap"}
    expected = {
        "name": "megatron_gpt",
        "model.encoder_seq_length": 512,
        "model.max_position_embeddings": 512,
        "model.hidden_dropout": 0.1,
        "model.micro_batch_size": 4,
        "model.global_batch_size": 256,
        "model.use_distributed_optimizer": True,
        "model.fp8_params": True,
        "model.optim.betas": [0.9, 0.98],
        "model.optim.sched.warmup_steps": 500,
        # The rate is at its least for the last 50,000 of 100,000 steps.
        "model.optim.sched.decay_steps": 50_000,
        "trainer.devices": 8,
        "trainer.max_steps": 100_000,
        # A checkpoint at each validation.
        "checkpoint.save_interval": 100,
    }
    assert {key: done.keys.get(key) for key in expected} == expected
    assert done.keys["model.data.data_prefix"][::2] == [0.5, 0.5]
    lost = " ".join(done.section("without counterpart"))
    assert "model.normalization=layernorm1p" in lost
    assert "save_top_k=10" in lost


def test_a_growing_batch_keeps_its_name(capsys):
    growing = ("model.global_batch_size=256", "model.rampup_batch_size=[64,64,10000]")
    done = translate(capsys, "--from", "nemo", GPT, "trainer.devices=8", *growing)

    assert done.code == 0, done.report
    assert done.keys["model.rampup_batch_size"] == [64, 64, 10000]
    assert "model.rampup_batch_size" not in translate(capsys, "--from", "nemo", GPT, "trainer.devices=8").keys


def test_megatron_llama_config(capsys):
    # Found out from the file.
    done = translate(capsys, LLAMA, "model.override_vocab_size=128256")

    assert done.code == 0, done.report
    assert done.choices == {"model": "llama3_8b", "parallelism": "dp", "data": "mmap"}
    assert done.keys["model.data.data_prefix"] == [1.0, "/data/train_text_document"]
    assert done.keys["model.data.validation_prefix"] == ["/data/valid_text_document"]
    # 128,256 is 250.5 times 128 × 4, so the embedding has 128,512 rows there.
    assert done.keys["model.make_vocab_size_divisible_by"] == 512
    assert (done.keys["trainer.devices"], done.keys["trainer.num_nodes"]) == (8, 4)
    assert done.keys["checkpoint.save_interval"] == 1000
    assert "model.optim.sched.decay_steps" not in done.keys
    lost = " ".join(done.section("without counterpart"))
    assert "trainer.val_check_interval=0.5" in lost
    assert "model.data.reset_position_ids=true" in lost
    assert "model.data.data_prefix.test=" in lost
    assert "run_dir: where the run writes (exp_manager.explicit_log_dir=/results/llama3)" in done.text


def test_what_a_file_leaves_out_has_nemos_default(capsys, tmp_path):
    path = tmp_path / "least.yaml"
    path.write_text(
        "trainer: {max_steps: 10, precision: bf16}\n"
        "model:\n  {micro_batch_size: 1, global_batch_size: 1, encoder_seq_length: 64, max_position_embeddings: 64,"
        " num_layers: 2, hidden_size: 64, num_attention_heads: 2, fp8: True, megatron_amp_O2: True,"
        " override_vocab_size: 512, data: {data_impl: mock}, optim: {name: fused_adam, lr: 1e-3}}\n"
    )
    done = translate(capsys, str(path))

    assert done.code == 0, done.report
    assert done.choices["fp8"] == "delayed"
    # apex's own, not those of megatron_gpt_config.yaml.
    assert (done.keys["model.optim.betas"], done.keys["model.optim.weight_decay"]) == ([0.9, 0.999], 0.01)
    assert done.keys["model.optim.sched.name"] == "constant"
    assert done.keys["model.activation"] == "gelu_tanh"
    assert done.keys["model.hidden_dropout"] == 0.1
    assert done.keys["trainer.gradient_clip_val"] == 0.0


@pytest.mark.parametrize(
    ("override", "expected"),
    [((), None), (("data_dir=/data",), ["/data/a_text_document"])],
)
def test_what_another_file_knows_is_up_to_the_user(capsys, tmp_path, override, expected):
    path = tmp_path / "launcher.yaml"
    text = (FOLDER / LLAMA).read_text().replace("[1.0, /data/train_text_document]", "['${data_dir}/a_text_document']")
    path.write_text(text)
    done = translate(capsys, str(path), "model.override_vocab_size=128256", *override)

    assert done.keys.get("model.data.data_prefix") == expected
    told = "${data_dir}/a_text_document" in " ".join(done.section("not known from there"))
    assert told is (expected is None)


def test_overrides_alone(capsys):
    done = translate(capsys, "--from", "nemo", *NEMO_FP8_WITH_TE)

    assert done.choices == {"fp8": "delayed"}
    assert done.keys["model.fp8_params"] is True
    assert done.keys["model.transformer_engine"] is True


@pytest.mark.parametrize("file", [GPT, LLAMA])
def test_every_setting_is_in_a_list(file):
    translation = FORMATS["nemo"](Given(files=[FOLDER / file], words=["++model.new_key=3"], environment={}))
    texts = "\n".join(translation.texts())
    assert [lost.setting for lost in translation.lost if "new_key" in lost.setting] == ["++model.new_key=3"]
    for line in (FOLDER / file).read_text().splitlines():
        name, colon, value = line.partition("#")[0].strip().partition(": ")
        if colon and value.strip():
            assert name.lstrip("- ") in texts, line
