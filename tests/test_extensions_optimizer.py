"""A registered optimizer trains, skips, saves, resumes and reshards like ours, or is refused before the run."""

import json
import math
import sys

import pytest

from gpt_pretrain.config import own
from gpt_pretrain.config.choices import OptimizerName
from gpt_pretrain.extend.registry import REGISTERED
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.rules.extensions import import_given
from tests.emulated_training import emulated_training
from tests.extensions import TINY, run_extended, write_module
from tests.launching import REPOSITORY
from tests.test_training_guards import FINAL_NORM, same, spoil_gradient, state

EXAMPLE = REPOSITORY / "examples" / "my_lab"
LION = ("extensions=[my_lab.optimizers]", "model.optim.name=lab_lion")

# torch's Adam as an extension: its own form says what comes out.
ADAM = """
    from gpt_pretrain import extend

    @extend.optimizer("own", states=[{states}], elementwise={elementwise}, reads=["betas", "eps"])
    def build(params, config):
        import torch

        optim = config.model.optim
        return torch.optim.AdamW(
            params, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=False
        )
"""
STATES = '"step", "exp_avg", "exp_avg_sq"'
OWN = ("extensions=[lab]", "model.optim.name=own")

# A class that each case changes.
DESCENT = """
    from gpt_pretrain import extend

    @extend.optimizer("own", states=[{states}], elementwise=True)
    def build(params, config):
        import torch

        class Descent(torch.optim.Optimizer):
            def __init__(self):
                super().__init__(params, dict(lr=config.model.optim.lr, weight_decay=0.0, count=0))

            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    for weight in group["params"]:
                        state = self.state[weight]
                        {step}

        return {returned}
"""


@pytest.fixture
def lab_lion(monkeypatch):
    """The example's optimizer in this process, and nothing of it afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("_member_map_", "_value2member_map_", "_member_names_"):
        monkeypatch.setattr(OptimizerName, name, type(getattr(OptimizerName, name))(getattr(OptimizerName, name)))
    monkeypatch.setattr(own, "LOADED", [])
    monkeypatch.setattr(own, "GIVEN", [])
    registered = list(REGISTERED)
    import_given(LION)
    yield
    REGISTERED[:] = registered
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


def train(folder, name, *overrides, num_ranks=1, steps=4):
    run_dir = folder / name
    done = run_extended(
        folder, *TINY, f"trainer.max_steps={steps}", f"run_dir={run_dir}", *overrides, num_ranks=num_ranks
    )
    assert done.returncode == 0, done.stderr
    return [record.loss for record in load_metrics(run_dir).train]


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        (1, ["trainer.precision=fp32"]),
        (1, ["trainer.precision=bf16"]),
        (2, ["trainer.precision=bf16", "parallelism=dp"]),
    ],
)
def test_torchs_adam_as_an_extension_trains_as_ours(num_ranks, overrides, tmp_path):
    write_module(tmp_path, ADAM.format(states=STATES, elementwise=True))
    overrides = [*overrides, "model.optim.lr=1e-2", "model.optim.sched.name=constant"]
    ours = train(tmp_path, "ours", *overrides, num_ranks=num_ranks)
    theirs = train(tmp_path, "theirs", *overrides, *OWN, num_ranks=num_ranks)
    # The fused kernel rounds in another order; losses are means over 64 tokens of about 4.
    assert theirs == pytest.approx(ours, rel=1e-5 if "trainer.precision=fp32" in overrides else 1e-3)
    assert max(theirs) - min(theirs) > 0.01


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((1, []), (1, [])),
        ((2, ["parallelism=dp"]), (1, [])),
        ((1, []), (2, ["parallelism=tp2"])),
    ],
    ids=["the same layout", "from two shards to one", "from one to two by tensor parallelism"],
)
def test_a_run_resumes_with_its_states(saved, resumed, tmp_path):
    """As a run without a stop: without its moments, or with wrong ones, the losses would differ by percents."""
    write_module(tmp_path, ADAM.format(states=STATES, elementwise=True))
    overrides = [*OWN, "trainer.precision=fp32", "model.optim.lr=1e-2", "model.optim.sched.name=constant"]
    straight = train(tmp_path, "straight", *overrides)
    train(tmp_path, "stopped", *overrides, *saved[1], num_ranks=saved[0], steps=2)
    both = train(tmp_path, "stopped", *overrides, *resumed[1], num_ranks=resumed[0])
    assert both == pytest.approx(straight, rel=1e-5)
    assert len(both) == 4


@pytest.mark.parametrize("bad_first", [True, False], ids=["the first step", "a later step"])
@pytest.mark.parametrize("overrides", [[], ["parallelism=dp", "trainer.precision=bf16"]], ids=["fp32", "distributed"])
def test_a_step_that_is_not_finite_might_as_well_not_have_been(overrides, bad_first, lab_lion):
    with emulated_training(*LION, *overrides) as training:
        if not bad_first:
            training.step()
        handle = training.chunks[0].get_submodule(FINAL_NORM).register_forward_hook(spoil_gradient(math.nan))
        training.step()
        handle.remove()
        training.step()
        after = state(training)
    with emulated_training(*LION, *overrides) as training:
        for _ in range(1 if bad_first else 2):
            training.step()
        assert same(state(training), after)


def test_the_plan_counts_the_states(tmp_path):
    write_module(tmp_path, ADAM.format(states=STATES, elementwise=True))
    planned = {}
    for name, overrides in {"adam": [], "own": OWN}.items():
        done = run_extended(
            tmp_path, "model=gpt2_124m", f"run_dir={tmp_path / name}", *overrides, module="gpt_pretrain.plan"
        )
        assert done.returncode == 0, done.stderr
        planned[name] = json.loads((tmp_path / name / "plan.json").read_text())["memory"]
    assert planned["own"] == planned["adam"]


@pytest.mark.parametrize(
    ("source", "overrides", "parts"),
    [
        (ADAM.format(states='"exp_avg"', elementwise=True), [], ["exp_avg_sq", "step", "states=['exp_avg']"]),
        (DESCENT.format(states="", step="pass", returned="Descent()"), [], ["leaves a parameter"]),
        (DESCENT.format(states="", step="weight.sub_(1 / 0)", returned="Descent()"), [], ["line 17", "ZeroDivision"]),
        (DESCENT.format(states="", step="pass", returned="3"), [], ["int", "torch.optim.Optimizer"]),
        (
            DESCENT.format(states="", step="group['count'] += 1; weight.sub_(weight.grad)", returned="Descent()"),
            [],
            ["parameter groups"],
        ),
        (
            DESCENT.format(
                states='"m"',
                step="weight.sub_(state.setdefault('m', torch.ones_like(weight)) * weight.grad)",
                returned="Descent()",
            ),
            [],
            ["zeros"],
        ),
        (
            DESCENT.format(states='"m"', step="state['m'] = 1; weight.sub_(weight.grad)", returned="Descent()"),
            [],
            ["'m'", "int"],
        ),
        (DESCENT.format(states="", step="weight.sub_(0.1 * weight.grad)", returned="Descent()"), [], ["group['lr']"]),
        (
            DESCENT.format(
                states="",
                step="weight.sub_(group['lr'] * weight.grad / (t := vars(self).get('t', 0) + 1)); self.t = t",
                returned="Descent()",
            ),
            [],
            ["optimizer.state", "second step"],
        ),
        (
            DESCENT.format(
                states="", step="weight.sub_(group['lr'] * weight.grad / weight.grad.norm())", returned="Descent()"
            ),
            [],
            ["'own'", "elementwise=True", "flat range", "values", "elementwise=False"],
        ),
        (
            DESCENT.format(
                states="",
                step="weight.sub_(weight.grad - weight.grad.mean(-1, keepdim=True) * (weight.dim() - 1))",
                returned="Descent()",
            ),
            [],
            ["'own'", "elementwise=True"],
        ),
        (
            DESCENT.format(states="", step="pass", returned="Descent()").replace("step(self)", "step(self, closure)"),
            [],
            ["'own'", "step(closure)", "step(self, closure=None)"],
        ),
        (ADAM.format(states=STATES, elementwise=False), ["model.use_distributed_optimizer=true"], ["=own"]),
        (ADAM.format(states=STATES, elementwise=False), ["model.tensor_model_parallel_size=2"], ["=own", "size=2"]),
        (ADAM.format(states=STATES, elementwise=True), ["model.optim.momentum=0.5"], ["momentum=0.5", "=own"]),
        (ADAM.format(states=STATES, elementwise=True).replace('"own"', '"adam"'), [], ["'adam'", "its own"]),
        (ADAM.format(states=STATES, elementwise=True).replace('"betas"', '"lr"'), [], ["reads", "lr"]),
    ],
)
def test_an_optimizer_that_a_run_could_not_trust_is_refused(source, overrides, parts, tmp_path):
    write_module(tmp_path, source)
    done = run_extended(tmp_path, *TINY, *OWN, f"run_dir={tmp_path / 'run'}", *overrides)
    assert done.returncode in (1, 2), done.stdout
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
    assert not (tmp_path / "run/checkpoints").exists()
