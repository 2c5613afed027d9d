"""`gpt_pretrain.translate` from NeMo-Automodel: values worked out by hand, and every key of its FP8 guide."""

import pytest
from omegaconf import OmegaConf

from gpt_pretrain.translate.formats import FORMATS, Given
from gpt_pretrain.translate.structured_files import flat
from tests.translations import FOLDER, translate

LLAMA, GPT2, QWEN = (
    "automodel_llama3_1_8b_fp8.yaml",
    "automodel_gpt2_pretrain.yaml",
    "automodel_qwen3_8b_pretrain.yaml",
)


def test_llama3_1_8b_in_fp8(capsys):
    done = translate(capsys, "--env", "WORLD_SIZE=8", LLAMA)

    assert done.code == 0, done.report
    assert done.choices == {"model": "llama3_1_8b", "parallelism": "fsdp", "fp8": "torchao_tensorwise"}
    expected = {
        "model.global_batch_size": 32,
        "model.seed": 1111,
        "model.fp8_params": True,
        "model.optim.betas": [0.9, 0.999],
        "model.optim.weight_decay": 0,
        "model.optim.sched.name": "constant",
        "trainer.max_steps": 100,
        "checkpoint.save_interval": 200,
    }
    assert {key: done.keys.get(key) for key in expected} == expected
    assert done.keys["model.optim.lr"] == 1e-5
    assert "from_pretrained" in " ".join(done.section("without counterpart"))
    assert "rowan/hellaswag" in " ".join(done.section("not known from there"))


def test_every_key_of_the_fp8_guide(capsys, tmp_path):
    path = tmp_path / "guide.yaml"
    path.write_text(
        "compile:\n  enabled: true\n  mode: default\n  fullgraph: false\n  dynamic: false\n"
        "fp8:\n  enabled: true\n  recipe_name: rowwise_with_gw_hp\n  enable_fsdp_fp8_all_gather: false\n"
        "  precompute_fp8_dynamic_scale_for_fsdp: true\n  force_recompute_fp8_weight_in_bwd: true\n"
        '  filter_fqns: ["lm_head", "q_proj", "down_proj", "vision"]\n  emulate: true\n'
    )
    done = translate(capsys, str(path))

    assert done.choices["fp8"] == "torchao_rowwise_with_gw_hp"
    assert done.keys["model.fp8_exclude"] == ["*.linear_qkv", "*.linear_fc2"]
    assert done.keys["model.fp8_emulate"] is True
    assert "(vision)" in " ".join(done.section("without counterpart"))
    not_needed = " ".join(done.section("not needed here"))
    for name in ("compile.mode", "fp8.precompute_fp8_dynamic_scale_for_fsdp", "fp8.force_recompute_fp8_weight_in_bwd"):
        assert f"{name}=" in not_needed


def test_gpt2_on_indexed_files(capsys):
    done = translate(capsys, GPT2, "--dataset.split", "0.9, 0.1, 0.0")

    assert done.code == 0, done.report
    assert done.choices == {"model": "gpt2_124m", "parallelism": "fsdp", "data": "mmap"}
    assert done.keys["model.data.data_prefix"] == ["fineweb_edu/processed_data_0_text_document"]
    assert done.keys["model.data.splits_string"] == "0.9,0.1,0.0"
    # 1,024 samples / 512.
    assert done.keys["trainer.limit_val_batches"] == 2
    assert (done.keys["model.optim.sched.warmup_steps"], done.keys["model.optim.sched.min_lr"]) == (700, 0)


def test_qwen3_8b_by_its_sizes(capsys):
    done = translate(capsys, "--env", "WORLD_SIZE=8", QWEN)

    assert done.code == 0, done.report
    assert done.choices == {"model": "qwen3_8b", "parallelism": "fsdp", "data": "mock"}
    assert done.keys["model.max_position_embeddings"] == 40960
    assert done.keys["model.encoder_seq_length"] == 2048
    assert done.keys["model.tensor_model_parallel_size"] == 2
    assert done.keys["checkpoint.save_at_end"] is False


@pytest.mark.parametrize("file", [LLAMA, GPT2, QWEN])
def test_every_setting_is_in_a_list(file):
    path = FOLDER / file
    translation = FORMATS["automodel"](Given(files=[path], words=["--model.new_key=3"], environment={}))
    texts = "\n".join(translation.texts())
    for name in [*flat(OmegaConf.to_container(OmegaConf.load(path))), "model.new_key"]:
        assert f"{name}=" in texts
