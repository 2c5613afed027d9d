"""`gpt_pretrain.translate --to megatron-lm`: the command line comes back as the configuration that it was made of."""

import shlex
from types import SimpleNamespace

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.optimizer import build_scheduler
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.translate.__main__ import main
from gpt_pretrain.translate.megatron_arguments import megatron_parser
from gpt_pretrain.translate.to_megatron_lm import command_line
from tests.translations import translate

# What Megatron-LM has no argument for.
DIFFERENT = ["trainer.validate_at_start", "checkpoint.save_interval_minutes"]
ALIKE = ["trainer.validate_at_start=false", "checkpoint.save_interval_minutes=null", "checkpoint.save_interval=100"]


def keys(command):
    """The keys that a command line does not say."""
    return [each.partition("=")[0] for each in command.different]


@pytest.mark.parametrize(
    "overrides",
    [
        "model=gpt2_124m",
        "model=llama3_8b",
        "model=llama3_8b fp8=delayed model.fp8_params=true parallelism=tp4_sp model.make_vocab_size_divisible_by=64",
        "model=llama3_1_8b fp8=blockwise parallelism=fsdp",
        "model=mixtral_8x7b parallelism=ep8",
        "model=qwen3_8b parallelism=pp2_vp2",
        "model=qwen3_8b model.rope_scaling_factor=4 model.yarn_original_max_position_embeddings=32768",
        f"model=mistral_7b model.window_size=[4095,0] model.window_attn_skip_freq=[{','.join(['0', '1'] * 16)}]",
        "model=gpt2_124m model.optim.sched.decay_tokens=10251264 model.optim.sched.warmup_tokens=263168",
        "model=gpt2_124m model.activation=gelu model.optim.sched.name=wsd model.optim.sched.wsd_decay_steps=50",
        "model=gpt2_124m model.optim.sched.init_lr=1e-5 model.optim.sched.decay_steps=300",
        "model=gpt2_124m model.optim.sched.name=constant model.optim.sched.warmup_steps=0",
        "model=gpt2_124m trainer.limit_val_batches=0",
    ],
)
def test_what_goes_there_comes_back(overrides):
    config = load_config([*overrides.split(), "data=mock", "trainer.devices=8", *ALIKE])

    assert command_line(config).different == []


def test_the_command_is_read_by_the_way_there(capsys, tmp_path):
    assert (
        main(["--to", "megatron-lm", "model=llama3_8b", "data=mock", "trainer.devices=8", "trainer.num_nodes=2"]) == 0
    )
    printed = capsys.readouterr()
    path = tmp_path / "train.sh"
    path.write_text(printed.out)
    done = translate(capsys, str(path))

    assert done.code == 0, done.report
    assert done.choices == {"model": "llama3_8b", "data": "mock"}
    assert (done.keys["trainer.devices"], done.keys["trainer.num_nodes"]) == (8, 2)
    assert [line.partition("=")[0] for line in printed.err.splitlines()] == DIFFERENT


def test_indexed_files_and_rows_of_the_vocabulary():
    overrides = ["model=gpt2_124m", "data=mmap", "model.data.data_prefix=[0.3,a b,0.7,c]", "parallelism=tp2", *ALIKE]
    command = command_line(load_config([*overrides, "trainer.devices=2"]))

    assert command.different == []
    words = shlex.split(command.text.replace("\\\n", " "))
    assert words[words.index("--data-path") + 1 :][:4] == ["0.3", "a b", "0.7", "c"]
    # 128 for one rank are 64 for two.
    assert words[words.index("--make-vocab-size-divisible-by") + 1] == "64"


def test_what_null_stands_for_is_written():
    words = command_line(load_config(["model=llama3_8b", "data=mock", "model.optim.decoupled_lr=0.02", *ALIKE])).words

    # A tenth of 500 steps.
    assert words[words.index("--lr-warmup-iters") + 1] == "50"
    # A tenth of 3e-4, where Megatron-LM has 0, and of the decoupled rate.
    assert float(words[words.index("--min-lr") + 1]) == pytest.approx(3e-5)
    assert float(words[words.index("--decoupled-min-lr") + 1]) == pytest.approx(2e-3)


@pytest.mark.parametrize("sched", ["name=cosine", "name=linear", "init_lr=1e-4", "name=wsd wsd_decay_steps=6"])
def test_each_step_has_our_rate(sched):
    """megatron-core's scheduler, moved as each program moves it: Megatron-LM after a step, ours before it."""
    install_cpu_device()
    keys = [f"model.optim.sched.{each}" for each in ["warmup_steps=5", "decay_steps=18", *sched.split()]]
    config = load_config(["model=llama3_8b", "data=mock", "trainer.max_steps=20", *keys, *ALIKE[:2]])
    arguments, _ = megatron_parser().parse_known_args(command_line(config).words)
    theirs = rates(
        init_lr=arguments.lr_warmup_init,
        max_lr=arguments.lr,
        min_lr=arguments.min_lr,
        lr_warmup_steps=arguments.lr_warmup_iters,
        lr_decay_steps=arguments.lr_decay_iters,
        lr_decay_style=arguments.lr_decay_style,
        wsd_decay_steps=arguments.lr_wsd_decay_iters,
        lr_wsd_decay_style=arguments.lr_wsd_decay_style,
    )
    ours = build_scheduler(config, optimizer())
    for step in range(20):
        ours.step(1)
        assert theirs[step] == pytest.approx(ours.optimizer.param_groups[0]["lr"], rel=1e-9), step


def optimizer():
    return SimpleNamespace(param_groups=[{"params": [], "default_config": True}])


def rates(**arguments):
    """What Megatron-LM trains 20 steps with."""
    wd = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 20, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(optimizer(), **arguments, **wd)
    found = []
    for _ in range(20):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        # Steps of other sizes, and no step in which it could begin.
        "model.rampup_batch_size=[64,64,100000] trainer.max_tokens=1024000000 trainer.max_steps=null",
        "model.optim.sched.warmup_steps=0",
        # Its warmup begins at a rate of its own.
        "model.optim.decoupled_lr=0.02",
    ],
)
def test_rates_of_the_step_before_are_told(overrides):
    command = command_line(load_config(["model=gpt2_124m", "data=mock", *overrides.split(), *ALIKE]))
    (different,) = command.different
    assert different.startswith("model.optim.sched.warmup_")
    assert "--lr-warmup-init" not in command.words


def test_without_validation_its_interval_is_given():
    """Megatron-LM divides by it all the same."""
    words = command_line(load_config(["model=gpt2_124m", "data=mock", "trainer.limit_val_batches=0", *ALIKE])).words
    assert words[words.index("--eval-iters") + 1] == "0"
    assert int(words[words.index("--eval-interval") + 1]) > 0


def test_what_megatron_lm_cannot_do_is_told():
    overrides = ["model=llama3_8b", "data=mock", "model.z_loss_coeff=1e-4", "checkpoint.keep_best=true", *ALIKE]
    assert keys(command_line(load_config(overrides))) == ["model.z_loss_coeff", "checkpoint.keep_best"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model=tiny", "data=text"], "model.data.data_impl=text"),
        (["model=gpt2_124m", "data=mock", "model.bias=false"], "model.activation='gelu_tanh'"),
        (
            ["model=llama3_8b", "data=mock", "model.use_mup=true", "model.mup_base_hidden_size=256"],
            "model.use_mup=true",
        ),
        (
            ["model=llama3_8b", "data=mock", "model.final_logit_softcapping=15"],
            "model.final_logit_softcapping=15.0",
        ),
        (["model=llama3_8b", "data=mock", "model.value_embedding_freq=2"], "model.value_embedding_freq=2"),
    ],
)
def test_another_model_and_other_data_are_refused(overrides, told):
    with pytest.raises(ConfigError) as refused:
        command_line(load_config(overrides))
    assert told in str(refused.value)


def test_no_other_format_is_written(capsys):
    assert main(["--to", "nemo", "model=tiny"]) == 2
    assert "--to nemo" in capsys.readouterr().err
