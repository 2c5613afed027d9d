"""The plan of a run whose batch grows: steps, tokens and time of each stage, and its picture."""

import io
import json

import pytest
from rich.console import Console

from gpt_pretrain.plan.__main__ import main
from gpt_pretrain.plan.document import WIDTH, plan_document, print_plan
from gpt_pretrain.plan.schedule import rate_curve
from tests.planning import plan_of

ONE_GPU = ("model=gpt2_124m", "model.micro_batch_size=8")
GROWING = (
    *ONE_GPU,
    "model.global_batch_size=64",
    "model.rampup_batch_size=[16,16,3000]",
    "trainer.max_steps=null",
    "trainer.max_tokens=10240000",
    "model.optim.sched.name=wsd",
    "model.optim.sched.warmup_tokens=1024000",
    "model.optim.sched.wsd_decay_tokens=2048000",
)
# 10,000 samples of 1,024 tokens. 1,000 for each of three increments: 63 steps of 16 reach 1,008, 31 of 32 reach 2,000,
# 21 of 48 reach 3,008, and 6,992 samples are left, in 110 steps of 64.
STAGES = [(1, 63, 16, 2), (64, 31, 32, 4), (95, 21, 48, 6), (116, 110, 64, 8)]


def test_stages_have_the_steps_tokens_and_time_of_their_batch():
    schedule = plan_of(*GROWING).schedule
    found = [
        (each.first_step, each.num_steps, each.global_batch_size, each.num_microbatches) for each in schedule.stages
    ]
    assert found == STAGES
    assert (schedule.num_steps, schedule.num_tokens) == (225, (3008 + 110 * 64) * 1024)
    assert [each.begin_tokens for each in schedule.stages] == [0, 1008 * 1024, 2000 * 1024, 3008 * 1024]
    # What a run of this batch alone takes for a step.
    step_s = {
        batch: plan_of(*ONE_GPU, f"model.global_batch_size={batch}").speed.run.step_s for batch in (16, 32, 48, 64)
    }
    for each in schedule.stages:
        assert each.time_s == pytest.approx(each.num_steps * step_s[each.global_batch_size])
    assert schedule.time_s == pytest.approx(sum(num_steps * step_s[batch] for _, num_steps, batch, _ in STAGES))


def test_a_constant_batch_is_one_stage():
    plan = plan_of(*ONE_GPU, "model.global_batch_size=64", "trainer.max_steps=300")
    (stage,) = plan.schedule.stages
    assert (stage.num_steps, stage.num_tokens) == (300, 300 * 64 * 1024)
    assert plan.schedule.time_s == pytest.approx(300 * plan.speed.run.step_s)


def printed(plan):
    output = io.StringIO()
    print_plan(plan, Console(file=output, width=WIDTH, highlight=False))
    return output.getvalue()


def test_tables_show_all_steps_and_plan_json_has_them():
    plan = plan_of(*GROWING)
    text = printed(plan)
    assert max(map(len, text.splitlines())) <= WIDTH
    words = [line.split() for line in text.splitlines()]
    assert ["64", "1,032,192", "32", "4", "31", "1,015,808"] in [line[:6] for line in words]
    assert ["whole", "run", "225", "10,289,152"] in [line[:4] for line in words]
    assert "warmup to 1.02M tokens, constant to 8.19M tokens, linear decay to 10.2M tokens" in " ".join(text.split())
    document = json.loads(json.dumps(plan_document(plan)))["schedule"]
    assert document["num_steps"] == sum(stage["num_steps"] for stage in document["stages"]) == 225


def test_many_stages_are_shortened_in_tables_alone():
    plan = plan_of(
        *ONE_GPU, "model.global_batch_size=512", "model.rampup_batch_size=[8,8,40000]", "trainer.max_steps=1000"
    )
    lines = [line.split() for line in printed(plan).splitlines()]
    assert ["…"] * 7 in lines
    assert len(plan_document(plan)["schedule"]["stages"]) == 64


@pytest.mark.parametrize(("max_steps", "told"), [(50, True), (200, False)])
def test_a_run_that_ends_before_its_batch_has_grown_is_a_verdict(max_steps, told):
    ends = ("trainer.max_tokens=null", f"trainer.max_steps={max_steps}")
    phases = ("model.optim.sched.warmup_tokens=null", "model.optim.sched.wsd_decay_tokens=null")
    plan = plan_of(*GROWING, *ends, *phases, "model.optim.sched.wsd_decay_steps=10")
    assert any(verdict.label == "Batch" and verdict.is_bad for verdict in plan.verdicts) is told


def test_the_curve_of_the_rate_goes_through_its_corners():
    plan = plan_of(*GROWING)
    curve = dict(rate_curve(plan.spec.config, plan.schedule))
    lr = plan.spec.model.optim.lr
    assert curve[16 * 1024] == pytest.approx(lr / 1000 * 16)
    assert [curve[samples * 1024] for samples in (1008, 3008)] == pytest.approx([lr, lr])
    assert list(curve.values())[-1] == pytest.approx(lr / 10)
    assert list(curve) == sorted(curve)


def test_a_schedule_that_grows_leaves_a_picture(capsys, tmp_path):
    assert main([*GROWING, f"run_dir={tmp_path}"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert f"written: {tmp_path / 'schedule.html'}" in shown.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "schedule.html"]
    text = (tmp_path / "schedule.html").read_text()
    assert "default-src 'none'" in text
    for name in ("learning rate", "batch"):
        assert f'id="{name}"' in text
