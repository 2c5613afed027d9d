"""No key is accepted in vain: each is changed in runs where its part of the run is on, and counts there or is refused.

A key counts where its change reaches a field of megatron-core's configurations, or where the run, recorded as it
trains, reads it. So a new key that nothing reads fails here, without a row of its own.
"""

from dataclasses import replace

import pytest

from gpt_pretrain.config.choices import Precision
from gpt_pretrain.config.derived import model_parallel_size
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.keys import schema_keys, value_of
from gpt_pretrain.launch.ranks import rank_zero_of
from gpt_pretrain.megatron.model import translate_ddp, translate_optimizer, translate_transformer
from gpt_pretrain.plan.effective import planned_keys
from gpt_pretrain.rules import no_effect
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.rules.machine import check_machine
from gpt_pretrain.rules.no_effect import given_without_effect, why_no_effect
from gpt_pretrain.run.products import resolve
from tests.emulated_training import RECOMPUTED
from tests.forked_runs import fork_ranks
from tests.platforms import CPU, H200, spec_of
from tests.runs import small_run_arguments

KEYS = {
    path: key
    for path, key in schema_keys().items()
    if not path.startswith(("plan.", "benchmark.", "compare.", "coordinate_check."))
}
QUICK = ("trainer.max_steps=4", "model.num_layers=2")
# Runs on a CPU that are trained and recorded: every key is changed.
TRAINED = {
    "as conf/ has it": (),
    "all of trainer, checkpoint and logging": (
        "trainer.max_spike_rewinds=1",
        "trainer.spike_margin=1",
        "checkpoint.save_interval=1",
        "checkpoint.keep_last=3",
        "checkpoint.keep_every=2",
        "fp8=delayed",
        "model.fp8_emulate=true",
        "logging.fp8_statistics_interval=1",
        "logging.tensorboard=true",
        "sample.max_new_tokens=2",
        "trainer.max_time=00:01:00:00",
    ),
    "SGD at a constant rate": ("model.optim.name=sgd", "model.optim.sched.name=constant"),
    "Muon": ("optimizer=muon",),
    "Lion": ("optimizer=lion",),
    "warmup, stable, decay": ("optimizer=adam_wsd", "model.optim.sched.wsd_decay_steps=2"),
    "experts": ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=64"),
    "muP": ("model.use_mup=true", "model.mup_base_hidden_size=64"),
    "random tokens": ("data=mock",),
}
# Runs on H200s that are translated alone: the keys of the model are changed.
TRANSLATED = {
    "delayed": ("fp8=delayed", "model.fp8_params=true", "parallelism=dp"),
    "a history of one": ("fp8=delayed", "model.fp8_amax_history_len=1"),
    "the newest amax": ("fp8=delayed", "model.fp8_amax_compute_algo=most_recent"),
    "tensorwise": ("fp8=tensorwise", "model.first_last_layers_bf16=true"),
    "TP 2": ("parallelism=tp2_sp",),
    "small states": ("model.use_distributed_optimizer=true", "model.optim.use_precision_aware_optimizer=true"),
    "recomputation": RECOMPUTED,
}
# Read only where something goes wrong, or at a resume: the same command starts a run and goes on with it.
EXCEPTIONS = {
    "extensions": "read before the configuration is composed",
    "checkpoint.on_save_error": "read where a save has failed",
    "checkpoint.fall_back": "read where there are checkpoints",
    "checkpoint.allow_data_change": "read where there is a checkpoint",
    "checkpoint.allow_optimizer_change": "read where there is a checkpoint",
}


def explicit_values(key, value):
    """Values of the key's type, its own among them, without null and auto, which may stand for any of them."""
    match key.kind:
        case kind if kind is bool:
            found = [True, False]
        case kind if kind is int:
            found = [1, 2, 4, 16, *([] if value is None else [2 * value, value + 1])]
        case kind if kind is float:
            found = [0.5, 0.25, *([] if value is None else [value / 2, 2 * value])]
        case kind if kind is list:
            found = {"model.optim.betas": [[0.5, 0.5]], "model.fp8_exclude": [["*.linear_fc1"]]}.get(key.path, [["x"]])
        case kind if kind is str:
            found = {"model.data.splits_string": ["6,4,0"], "trainer.max_time": ["00:02:00:00"]}.get(key.path, ["x"])
        case kind:
            found = list(kind)
    values = [value, *(other for other in found if other != value)]
    return [value for value in values if value not in (None, Precision.auto)]


def changed(section, path, value):
    head, _, rest = path.partition(".")
    return replace(section, **{head: changed(getattr(section, head), rest, value) if rest else value})


def outcome(config, path, platform):
    """What megatron-core and the application's layers are given where a key was set; None where that is refused."""
    size = model_parallel_size(config.model) * (1 if platform is CPU else 2)
    launch = rank_zero_of(size, local_world_size=size, launcher="none" if size == 1 else "torchrun")
    if given_without_effect(config, frozenset([path])) or config_problems(config, launch):
        return None
    spec = spec_of(config, platform, launch)
    try:
        check_machine(spec)
    except ConfigError:
        return None
    emulated = spec.fp8 if spec.te_fp8 is None else None
    # megatron-core refuses these fusions where Transformer Engine does not import.
    features = {**spec.kernels.features, "moe_permute_fusion": False}
    core = replace(spec, kernels=replace(spec.kernels, apply_rope_fusion=False, features=features))
    built = [vars(translate(core)) for translate in (translate_transformer, translate_ddp, translate_optimizer)]
    return repr([*built, emulated, spec.kernels, spec.layout])


def vain_keys(config, platform, keys):
    """Keys of which two values are accepted, and every accepted one comes to the same."""
    assert outcome(config, "", platform) is not None
    for path in keys:
        values = explicit_values(schema_keys()[path], value_of(config, path))
        settings = [changed(config, path, value) for value in values]
        # The table of keys without effect knows which values ask for nothing.
        counting = [setting for setting in settings if not why_no_effect(resolve(setting), path)]
        outcomes = [found for setting in counting if (found := outcome(setting, path, platform)) is not None]
        if len(outcomes) > 1 and len(set(outcomes)) == 1:
            yield path


@pytest.mark.parametrize("case", TRAINED)
def test_every_key_of_a_run_counts_or_is_refused(case, tmp_path, cache_dir):
    arguments = small_run_arguments(tmp_path / "run", cache_dir, [*QUICK, *TRAINED[case]])[2:]
    if "data=mock" in TRAINED[case]:
        text = ("data=text", "model.data.", "model.tokenizer.")
        arguments = [argument for argument in arguments if not argument.startswith(text)]
    done = fork_ranks(1, ["tests/programs/recorded_run.py", str(tmp_path / "read"), *arguments])
    assert done.returncode == 0, done.stderr[-3000:]
    read = {*(tmp_path / "read").read_text().split(), *EXCEPTIONS}
    assert list(vain_keys(load_config(arguments), CPU, [path for path in KEYS if path not in read])) == []


@pytest.mark.parametrize("case", TRANSLATED)
def test_every_key_of_layers_and_layout_reaches_megatron_core_or_is_refused(case):
    config = load_config(["data=mock", "model.global_batch_size=64", *TRANSLATED[case]])
    assert list(vain_keys(config, H200, planned_keys())) == []


def test_keys_without_effect_are_found_where_no_table_has_them(monkeypatch):
    config = load_config(["data=mock", "model.global_batch_size=64", "fp8=tensorwise"])
    unread = ["model.optim.exp_avg_dtype", "model.fp8_interval", "trainer.spike_margin"]
    monkeypatch.setattr(no_effect, "_table", lambda: ())
    assert list(vain_keys(config, H200, ["model.optim.lr", *unread])) == unread
