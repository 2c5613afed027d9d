"""Layers, losses, FP8 recipes, features and validation tasks of extensions: built in, proven, stored, or refused."""

import math

import pytest

from gpt_pretrain.report.metrics_file import load_metrics
from tests.extensions import TINY, run_extended, write_module
from tests.launching import REPOSITORY

LAB = REPOSITORY / "examples" / "my_lab"
EMULATED = ("fp8=tensorwise", "model.fp8_emulate=true")

# An MLP with two more linear layers: one of the given spec's class, and one of torch's.
LAYER = """
    from functools import partial
    from gpt_pretrain import extend

    @extend.layer("gated")
    def gated(run, layer):
        import torch
        from megatron.core.transformer.mlp import MLP

        column_parallel = layer.submodules.mlp.keywords["submodules"].linear_fc1

        class Gated(MLP):
            def __init__(self, config, *args, name=None, **kwargs):
                super().__init__(config, *args, name=name, **kwargs)
                width = config.hidden_size
                self.gate = column_parallel(
                    width, width, config=config, init_method=config.init_method, bias=False, gather_output=True,
                    skip_bias_add=False, is_expert=False, name=f"{{name}}.gate",
                )
                self.plain = torch.nn.Linear(width, width, bias=False, dtype=config.params_dtype)

            def forward(self, hidden_states, *_, **__):
                {body}
                output, bias = super().forward(hidden_states)
                return output * torch.sigmoid(self.gate(hidden_states)[0]) + self.plain(hidden_states), bias

        layer.submodules.mlp = partial(Gated.as_mlp_submodule, **layer.submodules.mlp.keywords)
        return {returned}
"""
GATED = ("extensions=[lab]", "model.layer=gated")

LOSS = """
    from gpt_pretrain import extend

    @extend.loss("own")
    def own(logits, labels, config):
        import torch

        return {returned}
"""
CROSS_ENTROPY = "torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction='none')"
OWN_LOSS = ("extensions=[lab]", "model.loss=own")

TASK = """
    from gpt_pretrain import extend

    @extend.validation_task("task")
    def task(run, evaluate):
        return {returned}
"""

FEATURE = """
    from gpt_pretrain import extend
    from gpt_pretrain.features.feature import Feature

    @extend.feature("own")
    class Own(Feature):
        pass
"""


def write_layer(folder, *, body="pass", returned="layer"):
    write_module(folder, LAYER.format(body=body, returned=returned))


def run(folder, name, *overrides, num_ranks=1, steps=2):
    arguments = [*TINY, f"trainer.max_steps={steps}", f"run_dir={folder / name}", *overrides]
    return run_extended(folder, *arguments, num_ranks=num_ranks)


def train(folder, name, *overrides, num_ranks=1, steps=2):
    done = run(folder, name, *overrides, num_ranks=num_ranks, steps=steps)
    assert done.returncode == 0, done.stderr
    return load_metrics(folder / name)


def losses(metrics):
    return [record.loss for record in metrics.train]


def refused(done, *parts):
    assert done.returncode in (1, 2), done.stdout
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_the_proof_covers_a_layers_linear_layers_and_names_the_others(tmp_path):
    write_layer(tmp_path)
    (proof,) = train(tmp_path, "run", *GATED, *EMULATED, "logging.fp8_statistics_interval=1").fp8_proofs
    assert proof.layers_kept_out == ("decoder.layers.0.mlp.plain",)
    assert proof.warnings == ()
    tensors = {tensor.layer for record in load_metrics(tmp_path / "run").fp8 for tensor in record.tensors}
    assert "decoder.layers.0.mlp.gate" in tensors

    (excluded,) = train(tmp_path, "excluded", *GATED, *EMULATED, "model.fp8_exclude=['*.gate']").fp8_proofs
    assert set(excluded.layers_kept_out) == {"decoder.layers.0.mlp.gate", "decoder.layers.0.mlp.plain"}
    assert excluded.gemm_flops_share < proof.gemm_flops_share < 1
    refused(run(tmp_path, "typo", *GATED, *EMULATED, "model.fp8_exclude=['*.gat']"), "'*.gat'", "mlp.gate")


def test_a_layer_trains_alike_in_every_layout_and_across_a_resume(tmp_path):
    write_layer(tmp_path)
    constant = ["model.optim.lr=1e-2", "model.optim.sched.name=constant"]
    overrides = [*GATED, *constant, "trainer.precision=fp32", "model.num_layers=2"]
    straight = losses(train(tmp_path, "straight", *overrides, steps=4))
    train(tmp_path, "stopped", *overrides, "parallelism=tp2", num_ranks=2)
    both = losses(train(tmp_path, "stopped", *overrides, "parallelism=pp2", num_ranks=2, steps=4))
    assert both == pytest.approx(straight, rel=1e-5)
    assert len(set(both)) == 4


def test_a_checkpoint_needs_the_layer_it_was_trained_with(tmp_path):
    write_layer(tmp_path)
    train(tmp_path, "run", *GATED, "checkpoint.async_save=false")
    checkpoint = next((tmp_path / "run/checkpoints").glob("step_*"))

    given = [f"checkpoint={checkpoint}", f"out={tmp_path / 'hf'}"]
    exported = run_extended(tmp_path, *given, module="gpt_pretrain.export")
    refused(exported, "extensions=[lab]")
    exported = run_extended(tmp_path, *given, "extensions=[lab]", module="gpt_pretrain.export")
    refused(exported, "model.layer=gated", "lab.py")
    refused(run(tmp_path, "run", steps=4), "extensions=[lab]")
    refused(run(tmp_path, "run", "extensions=[lab]", steps=4), "model.layer")


def test_plan_says_that_it_does_not_count_a_layer(tmp_path):
    write_layer(tmp_path)
    for overrides, expected in ((GATED, True), ((), False)):
        done = run_extended(
            tmp_path, "model=gpt2_124m", f"run_dir={tmp_path / 'plan'}", *overrides, module="gpt_pretrain.plan"
        )
        assert done.returncode == 0, done.stderr
        assert ("model.layer=gated" in done.stdout and "not counted" in done.stdout) is expected


def test_torchs_cross_entropy_as_an_extension_trains_as_ours(tmp_path):
    write_module(tmp_path, LOSS.format(returned=CROSS_ENTROPY))
    overrides = ["model.optim.lr=1e-2", "trainer.precision=fp32"]
    ours = train(tmp_path, "ours", *overrides)
    for layout, num_ranks in (("single", 1), ("tp2", 2)):
        theirs = train(tmp_path, layout, *overrides, *OWN_LOSS, f"parallelism={layout}", num_ranks=num_ranks)
        assert losses(theirs) == pytest.approx(losses(ours), rel=1e-5)
        assert theirs.train[-1].grad_norm == pytest.approx(ours.train[-1].grad_norm, rel=1e-4)


def test_validation_stays_cross_entropy(tmp_path):
    write_module(tmp_path, LOSS.format(returned=f"3 + {CROSS_ENTROPY}"))
    ours, theirs = train(tmp_path, "ours"), train(tmp_path, "theirs", *OWN_LOSS)
    assert losses(theirs) == pytest.approx([3 + loss for loss in losses(ours)], rel=1e-5)
    assert theirs.validation[0].loss == ours.validation[0].loss


@pytest.mark.parametrize(
    ("source", "overrides", "parts"),
    [
        (LAYER.format(body="1 / 0", returned="layer"), GATED, ["'gated'", "lab.py", "ZeroDivisionError"]),
        (LAYER.format(body="pass", returned="3"), GATED, ["'gated'", "int", "ModuleSpec"]),
        (LAYER.format(body="pass", returned="layer"), [*GATED, "model.compile=true"], ["model.layer=gated"]),
        (
            LAYER.format(body="pass", returned="layer"),
            [*GATED, "model.use_mup=true", "model.mup_base_hidden_size=16"],
            ["model.use_mup=true", "model.layer=gated"],
        ),
        (
            LAYER.format(body="pass", returned="layer"),
            [*GATED, "model.cuda_graph_impl=local"],
            ["model.cuda_graph_impl=local", "model.layer=gated"],
        ),
        (LOSS.format(returned="1 / 0"), OWN_LOSS, ["'own'", "lab.py", "ZeroDivisionError"]),
        (LOSS.format(returned="logits.mean()"), OWN_LOSS, ["'own'", "[]", "[1, 32]"]),
        (
            LOSS.format(returned=CROSS_ENTROPY),
            [*OWN_LOSS, "model.cross_entropy_loss_fusion=true"],
            ["model.loss=own", "model.cross_entropy_loss_fusion=true"],
        ),
        (LOSS.format(returned=CROSS_ENTROPY).replace('"own"', '"cross_entropy"'), [OWN_LOSS[0]], ["its own loss"]),
        (TASK.format(returned="3"), ["extensions=[lab]"], ["'task'", "3"]),
        (TASK.format(returned="evaluate([[1]])"), ["extensions=[lab]"], ["'task'", "1 token ids", "2 to 32"]),
        (TASK.format(returned="evaluate([[1, 64]])"), ["extensions=[lab]"], ["'task'", "63"]),
        (FEATURE, ["extensions=[lab]", "model.features=[own]"], ["'own'", "lab.py", "FusedKernel"]),
        ("", ["model.features=[lab_tf32]"], ["lab_tf32", "extensions=["]),
        ("", ["model.layer=gated"], ["model.layer='gated'", "gpt"]),
    ],
)  # fmt: skip
def test_mistakes_name_the_extension_and_the_key(source, overrides, parts, tmp_path):
    write_module(tmp_path, source)
    refused(run(tmp_path, "run", *overrides), *parts)
    assert not (tmp_path / "run/checkpoints").exists()


EVALUATED = (
    "{str(n): sum(found) / len(found) for n, found in enumerate(evaluate([[n, 1, 2] * n for n in range(1, 6)]))}"
)


def task_numbers(folder, layout, num_ranks):
    """Five sequences of unequal lengths, which do not fill the ranks' last pass."""
    write_module(folder, TASK.format(returned=EVALUATED))
    overrides = ["extensions=[lab]", f"parallelism={layout}", "model.num_layers=2", "trainer.precision=fp32"]
    metrics = train(folder, layout, *overrides, num_ranks=num_ranks)
    assert [record.step for record in metrics.validation_tasks] == [record.step for record in metrics.validation]
    return metrics.validation_tasks[0].numbers


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    return task_numbers(tmp_path_factory.mktemp("single"), "single", 1)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp"])
def test_a_task_evaluates_the_model_alike_in_every_layout(layout, on_one_rank, tmp_path):
    assert task_numbers(tmp_path, layout, 2) == pytest.approx(on_one_rank, rel=1e-5)
    # At first each of 128 tokens is about as likely.
    assert [*on_one_rank.values()] == pytest.approx([math.log(128)] * 5, abs=0.1)
    assert len({*on_one_rank.values()}) == 5


def test_the_examples_recipe_is_emulated_and_proven(tmp_path):
    metrics = train(
        LAB, tmp_path / "run", "extensions=[my_lab.recipes]", *EMULATED, "model.fp8_recipe=lab_tensorwise_pow2",
        "logging.fp8_statistics_interval=1",
    )  # fmt: skip
    assert metrics.fp8_proofs[0].warnings == ()
    scales = [tensor.scale_max for record in metrics.fp8 for tensor in record.tensors]
    assert {math.frexp(scale)[0] for scale in scales} == {0.5}


@pytest.mark.parametrize(
    ("extension", "overrides", "parts"),
    [
        (
            "recipes",
            ["fp8=torchao_rowwise", "model.fp8_recipe=lab_tensorwise_pow2"],
            ["lab_tensorwise_pow2", "torchao"],
        ),
        ("features", ["model.features=[lab_tf3]"], ["lab_tf3", "lab_tf32?"]),
        ("features", ["model.features=[lab_tf32]"], ["[lab_tf32]", "trainer.precision=auto", "without it"]),
        ("features", ["model.features=[lab_tf32]", "trainer.precision=fp32"], ["[lab_tf32]", "a GPU"]),
        (
            "features",
            ["model.features=[lab_tf32]", "trainer.precision=fp32", "model.compile=true"],
            ["model.compile=true", "[lab_tf32]", "model.features without it"],
        ),
        ("layers", ["model.layer=lab_primer"], ["lab_primer", "model.activation=swiglu", "gelu"]),
    ],
)
def test_what_the_examples_cannot_do_is_refused_by_their_names(extension, overrides, parts, tmp_path):
    refused(run(LAB, tmp_path / "run", f"extensions=[my_lab.{extension}]", *overrides), *parts)


def test_the_examples_of_the_model_train(tmp_path):
    metrics = train(
        LAB, tmp_path / "run", "extensions=[my_lab.layers,my_lab.losses,my_lab.tasks]", "model.layer=lab_primer",
        "model.activation=gelu", "model.loss=lab_z_loss", "my_lab.z_weight=1e-3",
    )  # fmt: skip
    assert len(metrics.train) == 2
    # The logarithm of z is about that of the vocabulary's 128 rows.
    assert metrics.train[0].loss == pytest.approx(metrics.validation[0].loss + 1e-3 * math.log(128) ** 2, rel=0.01)
    assert set(metrics.validation_tasks[0].numbers) == {"lab_copying/new", "lab_copying/repeated"}
