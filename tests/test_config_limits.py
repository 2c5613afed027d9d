"""Numbers without bound: refused at once with the largest that are taken, which every rule and forecast can judge."""

import time

import pytest

from gpt_pretrain.__main__ import main as train
from gpt_pretrain.config.convert import WrongValue, convert
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.plan.__main__ import main as plan
from tests.refusals import compose_quickly, offered

NUMBERS = [key for key in schema_keys().values() if key.kind in (int, float)]
DEEP = "model.num_layers=1024 model.pipeline_model_parallel_size=128 model.global_batch_size=16777216"
BOUNDS = [
    DEEP,
    f"{DEEP} model=llama3_70b model.micro_batch_size=1 model.virtual_pipeline_model_parallel_size=8",
    "model=moe_small model.num_moe_experts=65536 model.num_layers=1024",
    "fp8=delayed model.num_layers=1024 model.encoder_seq_length=16777216 model.max_position_embeddings=16777216",
]

# Of CPU time. The slowest takes 2 s on a slow core; what grows with a number's value takes minutes or never ends.
LIMIT_S = 10.0


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: key.path)
@pytest.mark.parametrize("value", [99999999999999999999, 1e30, -1e30, "9" * 400])
def test_a_number_without_bound_is_refused_with_the_largest(key, value):
    with pytest.raises(WrongValue, match=str(key.facts.largest) if key.kind is int else "or less|not finite"):
        convert(value, key)


@pytest.mark.parametrize("key", [key for key in NUMBERS if key.kind is int], ids=lambda key: key.path)
def test_the_largest_number_is_read(key):
    assert convert(key.facts.largest, key) == key.facts.largest


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    "override", ["model.num_layers=99999999999999999999", "trainer.max_steps=1e30", "model.seed=4294967296"]
)
def test_it_is_refused_before_anything_is_computed(override, capsys):
    began = time.process_time()
    assert train([override]) == 2
    assert time.process_time() - began < LIMIT_S
    (line,) = capsys.readouterr().err.splitlines()
    message = line.removeprefix("error: ")
    assert message.startswith(override.partition("=")[0] + "=")
    (way,) = offered(message)
    assert compose_quickly(way)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("overrides", BOUNDS)
def test_the_largest_sizes_are_planned_at_once(overrides, tmp_path, capsys):
    began = time.process_time()
    assert plan([*overrides.split(), f"run_dir={tmp_path}"]) == 0
    assert time.process_time() - began < LIMIT_S
    capsys.readouterr()
