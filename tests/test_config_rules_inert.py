"""A key on the command line that nothing reads is refused; the same value from the files of conf/ is nobody's wish."""

from itertools import product

import pytest

from gpt_pretrain.commands.command_line import check_request, parse_command_line
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.rules.no_effect import no_effect_problems
from gpt_pretrain.run.products import resolve
from tests.refusals import compose_quickly, offered, taking

LEAN = ("model.optim.use_precision_aware_optimizer=true", "model.use_distributed_optimizer=true")
SGD = ("model.optim.name=sgd",)
DELAYED = ("fp8=delayed", "model.fp8_emulate=true")


def jobs(*arguments):
    return check_request(parse_command_line(list(arguments)), read_launch({}))


@pytest.mark.parametrize(
    ("key", "names", "without", "with_effect"),
    [
        ("model.optim.momentum=0.5", "model.optim.momentum=0.5 model.optim.name=adam model.optim.betas", (), SGD),
        ("model.optim.betas.0=0.5", "model.optim.betas=[0.5,0.95] model.optim.name=sgd", SGD, ()),
        (
            "model.optim.store_param_remainders=true",
            "model.optim.store_param_remainders=true model.optim.use_precision_aware_optimizer=false",
            (),
            LEAN,
        ),
        (
            "model.optim.sched.decay_steps=7",
            "model.optim.sched.decay_steps=7 model.optim.sched.name=constant",
            ("model.optim.sched.name=constant", "model.optim.sched.warmup_steps=2"),
            ("model.optim.sched.name=constant",),
        ),
        (
            "model.optim.sched.init_lr=1e-5",
            "model.optim.sched.init_lr=1e-05 model.optim.sched.warmup_steps",
            ("model.optim.sched.warmup_steps=0",),
            (),
        ),
        (
            "model.fp8_amax_compute_algo=max",
            "model.fp8_amax_compute_algo=max model.fp8_amax_history_len=1",
            (*DELAYED, "model.fp8_amax_history_len=1"),
            (*DELAYED, "model.fp8_amax_history_len=2"),
        ),
    ],
)
def test_a_key_that_nothing_reads_is_refused(key, names, without, with_effect):
    assert len(jobs(*without)) == len(jobs(*with_effect, key)) == 1
    with pytest.raises(ConfigError) as refused:
        jobs(*without, key)
    (problem,) = refused.value.problems
    assert problem.startswith(names.split()[0] + " ")
    assert [name for name in names.split() if name not in problem] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.fp8_amax_compute_algo=most_recent"],
        ["model.fp8_amax_history_len=1"],
        # NeMo 1.x's own values before it took Transformer Engine's.
        ["model.fp8_amax_history_len=1", "model.fp8_amax_compute_algo=most_recent"],
        # Accelerate's.
        ["model.fp8_amax_history_len=1024", "model.fp8_amax_compute_algo=most_recent"],
    ],
)
def test_a_history_and_an_algorithm_that_agree_pass(overrides):
    assert len(jobs(*DELAYED, *overrides)) == 1


def test_of_a_sweep_the_runs_that_do_not_read_it_are_named():
    with pytest.raises(ConfigError) as refused:
        jobs("-m", "model.optim.name=adam,sgd", "model.optim.momentum=0.5,0.9")
    assert [problem.partition("leave it out ")[2] for problem in refused.value.problems] == [
        "[model.optim.name=adam model.optim.momentum=0.5]",
        "[model.optim.name=adam model.optim.momentum=0.9]",
    ]


def test_what_is_only_shown_is_not_refused():
    assert len(jobs("--cfg", "job", *SGD, "model.optim.eps=1e-6")) == 1


def values_of(key):
    """Some values of a key as overrides write them, among them one that asks for something."""
    some = {int: [7], float: [0.5, 0.25], bool: ["true", "false"], list: ["[7]" if key.item is int else "[x]", "[]"]}
    members = [member.name for member in key.kind] if key.choices else some.get(key.kind, ["x"])
    return [*members, *(["null"] if key.optional else [])]


def told_of(path, overrides):
    problems = no_effect_problems(resolve(compose_quickly(overrides)))
    return [problem for problem in problems if f"{path}=" in problem.partition(" no effect")[0]]


UNREAD = [(path, unread) for path, key in schema_keys().items() for unread in key.facts.unread[:1] if unread.instead]


@pytest.mark.parametrize(("path", "unread"), UNREAD, ids=lambda value: getattr(value, "key", value))
def test_a_key_that_another_one_leaves_unread_is_told_with_a_way_out(path, unread):
    values = product(values_of(schema_keys()[unread.key]), values_of(schema_keys()[path]))
    overrides = [[f"{unread.key}={cause}", f"{path}={value}"] for cause, value in values]
    told = [(line, message) for line in overrides for message in told_of(path, line) if f"{unread.key}=" in message]
    assert told
    for line, message in told:
        # A group's option sets the other key.
        ways = [taking(way, line[1:] if "." not in way[0].partition("=")[0] else line) for way in offered(message)]
        assert any(message not in told_of(path, way) for way in ways), message
