"""conf/ and the schema say the same, and the presets are the models that they are named after."""

import re
from enum import Enum

import pytest
from omegaconf import OmegaConf

from gpt_pretrain.config.choices import Activation, Normalization, PositionEmbedding, TokenizerLibrary
from gpt_pretrain.config.convert import convert
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.facts import NOT_TOLD
from gpt_pretrain.config.keys import (
    UNSUPPORTED,
    UNSUPPORTED_VALUES,
    aliases,
    flatten,
    nearest_key,
    schema_keys,
    schema_sections,
    unknown_key,
)
from gpt_pretrain.config.load import config_to_yaml, load_saved_config
from gpt_pretrain.config.source import Loader, Source
from gpt_pretrain.rules.jobs import load_config
from tests.launching import REPOSITORY

# Published parameter counts (Hugging Face model cards; GPT-3: Brown et al. 2020, table 2.1, and D.1 for 175B).
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_1_5b": 1_557_611_200,
    "gpt3_1_3b": 1.3e9,
    "gpt3_6_7b": 6.7e9,
    "gpt3_175b": 174.6e9,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "mistral_7b": 7_248_023_552,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_32b": 32_763_876_352,
    "llama3_1_8b": 8_030_261_248,
    "mistral_nemo_12b": 12_247_782_400,
    "phi4": 14_659_507_200,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "smollm3_3b": 3_075_098_624,
    # Of 30.5B, what a token meets.
    "qwen3_30b_a3b": 3.3e9,
}

NEMO_KEYS = (
    "model.micro_batch_size model.global_batch_size model.encoder_seq_length model.max_position_embeddings "
    "model.num_layers model.hidden_size model.ffn_hidden_size model.num_attention_heads model.num_query_groups "
    "model.tensor_model_parallel_size model.pipeline_model_parallel_size model.virtual_pipeline_model_parallel_size "
    "model.context_parallel_size model.sequence_parallel model.transformer_engine model.seed "
    "model.fp8 model.fp8_e4m3 model.fp8_hybrid model.fp8_margin model.fp8_interval model.fp8_amax_history_len "
    "model.fp8_amax_compute_algo model.fp8_params "
    "model.activations_checkpoint_granularity model.activations_checkpoint_method "
    "model.activations_checkpoint_num_layers model.data.data_prefix model.data.splits_string model.data.data_impl "
    "model.tokenizer.library model.tokenizer.model model.optim.name model.optim.lr model.optim.betas "
    "model.optim.weight_decay model.optim.sched.name model.optim.sched.warmup_steps model.optim.sched.min_lr "
    "trainer.devices trainer.num_nodes trainer.precision trainer.max_steps trainer.max_time "
    "trainer.log_every_n_steps trainer.val_check_interval trainer.limit_val_batches trainer.gradient_clip_val"
)


def presets():
    loader = Loader(Source())
    return [(group, option) for group in loader.groups() for option in loader.options(group)]


def count_parameters(model):
    """Counted matrix by matrix, as the papers describe the layers."""
    width, heads = model.hidden_size, model.num_attention_heads
    head = model.kv_channels or width // heads
    groups = model.num_query_groups or heads
    inner = model.ffn_hidden_size or 4 * width
    qkv, up = (heads + 2 * groups) * head, (2 if model.activation is Activation.swiglu else 1) * inner
    norm = width * (2 if model.normalization is Normalization.layernorm else 1)
    layer = width * qkv + heads * head * width + width * up + inner * width + 2 * norm
    layer += qkv if model.bias or model.qkv_bias else 0
    layer += 2 * head if model.qk_layernorm else 0
    layer += width + up + width if model.bias else 0
    embeddings = model.vocab_size * width * (1 if model.share_embeddings_and_output_weights else 2)
    if model.position_embedding_type is PositionEmbedding.learned_absolute:
        embeddings += model.max_position_embeddings * width
    return model.num_layers * layer + norm + embeddings


def test_conf_sets_exactly_the_keys_of_the_schema():
    composed = Loader(Source()).compose([])
    content = OmegaConf.to_container(composed, resolve=False)
    content.pop("hydra")
    assert {path for path, _ in flatten(content)} == set(schema_keys())


@pytest.mark.parametrize(("group", "option"), presets())
def test_every_preset_composes_and_reads_as_its_types(group, option):
    open_values = ["model.num_layers=2", "model.hidden_size=8", "model.num_attention_heads=2", "model.vocab_size=9"]
    given = [*open_values, "model.encoder_seq_length=8"] if (group, option) == ("model", "base") else []
    load_config([f"{group}={option}", *given])


@pytest.mark.parametrize("path", schema_keys())
def test_every_key_is_documented(path):
    assert len(schema_keys()[path].doc) > 5
    assert schema_keys()[path].type_text


@pytest.mark.parametrize("path", schema_sections())
def test_every_section_is_documented_under_its_name(path):
    assert schema_sections()[path].__doc__.startswith(f"`{path}`: ")


@pytest.mark.parametrize(("preset", "published"), PUBLISHED.items())
def test_model_presets_have_the_published_size(preset, published):
    count = count_parameters(load_config([f"model={preset}"]).model)
    assert published in (count, round(count, -8))


@pytest.mark.parametrize("path", NEMO_KEYS.split())
def test_nemo_keys_are_where_nemo_has_them(path):
    assert path in schema_keys()


def yaml_of(value):
    return value.name if isinstance(value, Enum) else value


@pytest.mark.parametrize("key", schema_keys().values(), ids=lambda key: key.path)
def test_names_and_values_in_the_facts_of_a_key_are_those_of_the_schema(key):
    facts = key.facts
    for value in [*(facts.idle or ()), *([] if facts.before is NOT_TOLD else [facts.before])]:
        assert convert(yaml_of(value), key) == value
    assert not facts.has_range or key.kind in (int, float)
    assert facts.word is None or key.kind is list
    for unread in facts.unread:
        other = schema_keys()[unread.key]
        assert all(convert(yaml_of(value), other) == value for value in unread.values)
        names = re.findall(r"([\w.{}]+)=", unread.instead)
        assert {name.format(key=key.path) for name in names} <= {*schema_keys(), *Loader(Source()).groups()}


def test_no_name_of_another_code_stands_for_two_keys():
    assert len(aliases()) == sum(len(key.facts.aliases) for key in schema_keys().values())


@pytest.mark.parametrize("alias", aliases())
def test_names_of_other_codes_are_no_keys(alias):
    assert alias not in {known.rpartition(".")[2] for known in schema_keys()}


@pytest.mark.parametrize(("name", "reason"), UNSUPPORTED.items())
def test_names_of_other_codes_without_a_key_are_answered_with_the_reason(name, reason):
    assert name not in aliases()
    assert name not in {known.rpartition(".")[2] for known in schema_keys()}
    assert unknown_key(f"model.{name}") == f"model.{name} is not a key: {reason}"


@pytest.mark.parametrize(("path", "value"), UNSUPPORTED_VALUES)
def test_values_of_other_codes_are_answered_with_a_way_out(path, value):
    with pytest.raises(ConfigError) as refused:
        load_config([f"{path}={value}"])
    (problem,) = refused.value.problems
    assert problem.startswith(f"{path}={value!r} is ")
    assert problem.endswith(f"; {UNSUPPORTED_VALUES[path, value]}")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("model.hiden_size", "model.hidden_size"),
        ("training.steps", "trainer.max_steps"),
        ("train_batch_size", "model.global_batch_size"),
        ("training.local_batch_size", "model.micro_batch_size"),
        ("checkpoint.interval", "checkpoint.save_interval"),
        ("modle.fp8", "model.fp8"),
        ("optim.lr", "model.optim.lr"),
        ("model.lr", "model.optim.lr"),
        ("model.optimizer.lr", "model.optim.lr"),
        ("micro_batch_size", "model.micro_batch_size"),
        ("model.tensor_parallel_size", "model.tensor_model_parallel_size"),
        ("model.pipeline_parallel_size", "model.pipeline_model_parallel_size"),
        ("model.parallelism.tp", "model.tensor_model_parallel_size"),
        ("trainer.max_step", "trainer.max_steps"),
        ("trainer.gradient_clip", "trainer.gradient_clip_val"),
        ("model.seq_length", "model.encoder_seq_length"),
        ("model.num_heads", "model.num_attention_heads"),
        ("max_steps", "trainer.max_steps"),
        ("model.data.prefix", "model.data.data_prefix"),
        ("checkpoint.save_steps", "checkpoint.save_interval"),
        ("model.fp8_param", "model.fp8_params"),
        ("model.fp8_param_gather", "model.fp8_params"),
        ("model.fp8_amax_history", "model.fp8_amax_history_len"),
        ("fp8.margin", "model.fp8_margin"),
        ("zzz.qqq", None),
    ],
)
def test_nearest_key_is_the_one_that_was_meant(wrong, meant):
    assert nearest_key(wrong) == meant


def test_a_configuration_written_as_yaml_reads_back_the_same(tmp_path):
    config = load_config(
        [
            "data=mock",
            "model.optim.name=sgd",
            "model.data.data_prefix=[0.7,web,0.3,'2024']",
            "model.activations_checkpoint_granularity=full",
            "trainer.max_time='01:02:03:04'",
            r"sample.prompt='a \${b} : # c \\\${d} \\'",
            "run_dir='1e-3'",
        ]
    )
    assert config.sample.prompt == "a ${b} : # c \\${d} \\"
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config))
    assert load_saved_config(path) == config
    assert "library: none" in path.read_text()


def test_what_the_first_version_has_saved_is_read_as_its_model():
    saved = load_saved_config(REPOSITORY / "tests" / "saved_config.yaml")
    # A new key fails here until config.load knows what it was before it existed.
    assert saved.model == load_config(["data=mock", "model.num_layers=1", "model.optim.lr=6e-3"]).model
    assert saved.checkpoint == load_config(["checkpoint.save_interval_minutes=null"]).checkpoint
    assert saved.trainer == load_config(["trainer.max_steps=2", "trainer.limit_val_batches=0"]).trainer
    assert saved.logging == load_config(["logging.fp8_proof_interval=null"]).logging


def test_a_removed_key_is_read_with_the_only_value_that_it_took(tmp_path):
    config, path = load_config([]), tmp_path / "config.yaml"
    saved = config_to_yaml(config).replace("model:\n", "model:\n  nccl_ub: false\n", 1)
    path.write_text(saved)
    assert load_saved_config(path) == config
    path.write_text(saved.replace("nccl_ub: false", "nccl_ub: true"))
    with pytest.raises(ConfigError, match=r"model\.nccl_ub"):
        load_saved_config(path)


def test_values_are_typed():
    config = load_config(["trainer.max_steps=1e3", "model.optim.lr=1", "model.optim.betas=[0,0.5]"])
    assert config.trainer.max_steps == 1000
    assert isinstance(config.trainer.max_steps, int)
    assert isinstance(config.model.optim.lr, float)
    assert config.model.optim.betas == [0.0, 0.5]
    assert config.model.tokenizer.library is TokenizerLibrary.bpe
    assert all(
        isinstance(key.kind, type) and (issubclass(key.kind, Enum) or not key.choices) for key in schema_keys().values()
    )


def test_a_saved_configuration_may_have_keys_of_tools_that_are_gone(tmp_path):
    config = load_config([])
    saved = OmegaConf.create(config_to_yaml(config))
    saved.benchmark.update({"forecast": True, "markdown": "notes.md"})
    OmegaConf.save(saved, tmp_path / "config.yaml")
    assert load_saved_config(tmp_path / "config.yaml") == config
    saved.benchmark.forcast = True
    OmegaConf.save(saved, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"benchmark\.forcast"):
        load_saved_config(tmp_path / "config.yaml")
