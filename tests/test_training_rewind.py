"""Back behind a loss spike: as if its samples had not been in the data, also for a run that is killed on the way."""

import json
import signal

import pytest

from gpt_pretrain.checkpoint.directory import latest_checkpoint
from gpt_pretrain.checkpoint.load import VerifiedCheckpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress, check_files, read_manifest
from gpt_pretrain.config.schedule import Trained, num_train_samples
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.training.rewind import checkpoints_away_from, take_back
from tests.checkpoint_files import publish
from tests.emulated_training import TINY, emulate, emulated_training
from tests.expert_training import EXPERTS
from tests.test_faults import curve, weights

# Steps of four samples, in one microbatch: step 21 reads samples 80 to 83.
NO_REWINDS = (
    *TINY,
    "model.micro_batch_size=4",
    "model.data.num_workers=0",
    "model.hidden_dropout=0.1",
    "model.optim.sched.name=cosine",
    "trainer.max_steps=30",
    "trainer.limit_val_batches=0",
    "trainer.log_every_n_steps=1",
    "checkpoint.save_interval=4",
    "logging.tensorboard=false",
    "sample.max_new_tokens=0",
)
REWINDS = ("trainer.max_spike_rewinds=2", "trainer.spike_margin=3")
RUN = (*NO_REWINDS, *REWINDS)


def bad_samples(first, num_samples):
    return ["poison_samples", first, num_samples, "output_layer", 30.0]


BAD_STEP = bad_samples(80, 4)


class Runs:
    """Starts runs in directories of their own."""

    def __init__(self, parent, folder):
        self._parent = parent
        self.folder = folder

    def __call__(self, name, *overrides, base=RUN, num_ranks=1, faults=()):
        """Exit codes and output; every rank notes the samples that it reads."""
        noted = {rank: [["note_samples", str(self.folder / f"{name}.samples.{rank}")]] for rank in range(num_ranks)}
        faults = {rank: [*noted[rank], *dict(faults).get(rank, [])] for rank in range(num_ranks)}
        arguments = [*base, f"run_dir={self.folder / name}", *overrides]
        return self._parent.run(arguments, self.folder / name, num_ranks=num_ranks, faults=faults)

    def samples(self, name, rank=0):
        """What a rank has read, in order."""
        return [int(line) for line in (self.folder / f"{name}.samples.{rank}").read_text().splitlines()]

    def records(self, name, kind):
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def newest(self, name):
        return read_manifest(latest_checkpoint(self.folder / name / "checkpoints"))


@pytest.fixture
def run(parent, tmp_path):
    return Runs(parent, tmp_path)


@pytest.fixture(scope="module")
def uncut(parent, tmp_path_factory):
    """A run that goes back once, and is never killed."""
    runs = Runs(parent, tmp_path_factory.mktemp("uncut"))
    codes, text = runs("uncut", faults={0: [BAD_STEP]})
    assert codes == [0], text
    return runs.folder / "uncut"


def test_what_is_given_up_goes_and_nothing_else(tmp_path):
    """Steps 15 and 500 are of attempts that the run was taken back from by hand: neither is a way back."""
    for step, saved_at in ((15, 1014.0), (10, 1010.0), (20, 1020.0), (30, 1030.0), (500, 1001.0)):
        publish(tmp_path, step, saved_at=saved_at)
    with emulated_training():
        now = TrainingProgress(step=34, consumed_samples=136, given_up=((11, 1015.0), (31, 2000.0)))
        paths = checkpoints_away_from(tmp_path, [33], now, before=33, margin=4)
        assert paths == [tmp_path / "step_00000020", tmp_path / "step_00000010"], "step 30 is too near"
        assert checkpoints_away_from(tmp_path, [22, 33], now, before=33, margin=4) == paths[1:]
        before = VerifiedCheckpoint(path=paths[1], manifest=read_manifest(paths[1]))
        after = take_back(before, next_sample=264, given_up_at=now)
    assert latest_checkpoint(tmp_path) == paths[1]
    assert sorted(path.name for path in tmp_path.glob("*")) == ["latest", "step_00000010", "step_00000500"], (
        "step 500 is not this run's to remove"
    )
    assert read_manifest(paths[1]).passed_over == after.manifest.passed_over == ((80, 184),)
    assert (after.manifest.consumed_samples, after.manifest.rewinds) == (264, 1)
    assert read_manifest(paths[1]).given_up == ((11, 1015.0), (31, 2000.0))
    assert check_files(paths[1], after.manifest) == []


def test_a_run_needs_the_same_number_of_samples_at_every_start(compose_config):
    """The order of data that are read more than once depends on it."""
    config = compose_config(*RUN)
    # Twice the 4 steps of an interval and the 3 of the margin beside the 30 of the run.
    assert num_train_samples(config) == (30 + 2 * 7) * 4
    assert num_train_samples(config, Trained(16, 64), passed_over=20) == (30 + 2 * 7) * 4
    assert num_train_samples(compose_config(*NO_REWINDS), Trained(10, 40)) == 30 * 4


def steps(first, last):
    """Samples of steps that pass over none."""
    return list(range(4 * (first - 1), 4 * last))


# Of two samples.
SMALLER = "model.micro_batch_size=2"
# The ranks on which the loss leaps, and the share of each step that each rank reads.
LAYOUTS = {
    "one process, told a step later": (1, ["trainer.log_every_n_steps=4", SMALLER], [0], [range(4)]),
    "FP8, delayed scaling": (1, emulate("delayed"), [0], [range(4)]),
    "DP2, distributed, BF16": (2, ["parallelism=dp", SMALLER, "trainer.precision=bf16"], [1], [range(2), range(2, 4)]),
    "PP2, experts": (2, ["parallelism=pp2", SMALLER, *EXPERTS], [1], [range(4), range(4)]),
}


@pytest.mark.parametrize(("num_ranks", "layout", "leaps_on", "shares"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_goes_back_as_if_the_samples_up_to_the_spike_had_not_been(num_ranks, layout, leaps_on, shares, run):
    codes, text = run("spiked", *layout, num_ranks=num_ranks, faults={rank: [BAD_STEP] for rank in leaps_on})
    assert codes == [0] * num_ranks, text
    (rewind,) = load_metrics(run.folder / "spiked").rewinds
    # Step 20 lies less than three steps before the spike.
    assert (rewind.step, rewind.spike_step, rewind.first_sample, rewind.num_samples) == (16, 21, 64, 20)
    last_seen = 22 if "trainer.log_every_n_steps=4" in layout else 21
    read = [*steps(1, last_seen), *steps(22, 35)]
    for rank, share in enumerate(shares):
        assert run.samples("spiked", rank) == [sample for sample in read if sample % 4 in share]
    saved = run.newest("spiked")
    assert (saved.step, saved.consumed_samples, saved.rewinds, saved.passed_over) == (30, 140, 1, ((64, 20),))

    # Which saves once, at its end: a save changes nothing.
    left_out = {rank: [["leave_out_samples", 64, 20]] for rank in range(num_ranks)}
    once = [*layout, "checkpoint.save_interval=null"]
    codes, text = run("without", *once, base=NO_REWINDS, num_ranks=num_ranks, faults=left_out)
    assert codes == [0] * num_ranks, text
    assert curve(run.folder / "spiked") == curve(run.folder / "without")
    assert weights(run.folder / "spiked") == weights(run.folder / "without")
    experts = [load_metrics(run.folder / name).experts for name in ("spiked", "without")]
    assert experts[0] == experts[1]
    assert bool(experts[0]) == (layout[-1] == EXPERTS[-1])


# Step 17 after the rewind is the process's 22nd.
KILLS = {
    "in the first step after it": ["die_at_step", 22],
    "after a save": ["die_at_step", 28],
    "before latest names it": ["die_in_rewind", 2],
    "while a later checkpoint goes": ["die_in_rewind", 6],
    "before its manifest says so": ["die_in_rewind", 10],
}


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS)
def test_a_run_killed_after_a_rewind_or_in_it_ends_as_the_one_that_never_was(kill, uncut, run):
    # Saves that the loop waits for: it is known which there are.
    codes, text = run("killed", "checkpoint.async_save=false", faults={0: [BAD_STEP, kill]})
    assert codes == [-signal.SIGKILL], text
    before = len(run.samples("killed"))
    codes, text = run("killed", faults={0: [BAD_STEP]})
    assert codes == [0], text
    assert curve(run.folder / "killed") == curve(uncut)
    assert weights(run.folder / "killed") == weights(uncut)
    saved = run.newest("killed")
    assert (saved.step, saved.consumed_samples, saved.rewinds, saved.passed_over) == (30, 140, 1, ((64, 20),))
    if kill[0] == "die_at_step":
        first = {22: 22, 28: 26}[kill[1]]
        assert run.samples("killed")[before:] == steps(first, 35), "what was passed over stays so"


def test_a_run_that_went_back_goes_on_in_another_layout_with_the_sample_that_comes_next(run):
    dp = ("parallelism=dp", SMALLER, "trainer.max_steps=22")
    codes, text = run("run", *dp, num_ranks=2, faults={0: [BAD_STEP], 1: [BAD_STEP]})
    assert codes == [0, 0], text
    before = len(run.samples("run"))
    codes, text = run("run", "trainer.max_steps=24", faults={0: [BAD_STEP]})
    assert codes == [0], text
    assert run.samples("run")[before:] == steps(28, 29)
    saved = run.newest("run")
    assert (saved.step, saved.consumed_samples, saved.rewinds, saved.passed_over) == (24, 116, 1, ((64, 20),))


def test_one_spike_more_than_it_may_go_back_behind_ends_the_run_with_a_dump(run):
    codes, text = run("run", "trainer.max_spike_rewinds=1", faults={0: [bad_samples(80, 8)]})
    assert codes == [1], text
    summary = load_metrics(run.folder / "run").summary
    assert (summary.end_reason, summary.exit_code) == ("loss_spike", 1)
    assert "and the run has gone back 1 times already (trainer.max_spike_rewinds=1); all tensors were finite" in text
    dump = json.loads((run.folder / "run" / "dumps" / "step_00000017.json").read_text())
    assert (dump["step"], dump["first_sample"], dump["num_samples"], dump["first_bad"]) == (17, 84, 4, None)
    assert run.newest("run").step == 16, "a spike was saved"


def test_a_spike_soon_after_a_rewind_goes_back_one_checkpoint_more(run):
    """Steps 29 and 30 are bad: the second is step 25 by then, too near to the checkpoint of step 24."""
    codes, text = run("run", faults={0: [bad_samples(112, 8)]})
    assert codes == [0], text
    assert [(record["step"], record["spike_step"]) for record in run.records("run", "rewind")] == [(24, 29), (20, 25)]
    assert run.samples("run") == [*steps(1, 29), *steps(30, 30), *steps(31, 40)]
    saved = run.newest("run")
    assert (saved.step, saved.consumed_samples, saved.rewinds, saved.passed_over) == (30, 160, 2, ((80, 40),))


def test_a_spike_with_no_checkpoint_before_it_is_trained_on_and_what_lies_near_it_is_no_way_back(run):
    """Step 25 is five steps behind the only checkpoint, which the spike of step 21 is next to."""
    bad = [bad_samples(80, 4), bad_samples(96, 4)]
    codes, text = run("run", "checkpoint.save_interval=20", faults={0: bad})
    assert codes == [0], text
    spikes = run.records("run", "rewind")
    assert [(record["step"], record["spike_step"], record["num_samples"]) for record in spikes] == [
        (21, 21, 0),
        (25, 25, 0),
    ]
    assert "step 21 is trained on: there is no checkpoint 3 steps away from every spike" in text
    assert run.samples("run") == steps(1, 30)
    assert load_metrics(run.folder / "run").rewinds == []
    assert run.newest("run").spikes == (21, 25)


def test_a_checkpoint_of_an_attempt_that_was_given_up_is_no_way_back(run):
    """Steps 12 to 24 are of the first attempt, and 16 is the newest that is old enough."""
    codes, text = run("run", "trainer.max_steps=24", "checkpoint.keep_last=null")
    assert codes == [0], text
    back = f"checkpoint.resume={run.folder / 'run' / 'checkpoints' / 'step_00000008'}"
    codes, text = run("run", back, "checkpoint.save_interval=10", faults={0: [BAD_STEP]})
    assert codes == [0], text
    (rewind,) = load_metrics(run.folder / "run").rewinds
    assert (rewind.step, rewind.spike_step) == (10, 21)
    ((step, _),) = run.newest("run").given_up
    assert step == 9


def test_a_damaged_checkpoint_is_passed_over_if_it_may_be_and_named(run):
    damaged = run.folder / "run" / "checkpoints" / "step_00000016"
    faults = {0: [["damage_at_step", 20, str(damaged)], BAD_STEP]}
    codes, text = run("run", "checkpoint.fall_back=true", "checkpoint.async_save=false", faults=faults)
    assert codes == [0], text
    (rewind,) = load_metrics(run.folder / "run").rewinds
    assert (rewind.step, rewind.spike_step) == (12, 21)
    (warning,) = rewind.warnings
    assert warning.startswith(f"{damaged} was skipped: {damaged}/")
    assert "has changed: its SHA-256 is" in warning
    assert f"warning: {warning}\n" in (run.folder / "run.0").read_text()


def test_a_checkpoint_that_is_being_written_can_be_the_one_to_go_back_to(run):
    codes, text = run("run", "checkpoint.save_interval=16", faults={0: [bad_samples(72, 4), ["hold_saves"]]})
    assert codes == [0], text
    (rewind,) = load_metrics(run.folder / "run").rewinds
    assert (rewind.step, rewind.spike_step) == (16, 19)
    (saved,) = [record for record in run.records("run", "checkpoint") if record["saved_step"] == 16]
    assert saved["step"] == 19, "the spike waited for it"


def test_a_spike_in_the_step_that_a_save_is_due_after_is_not_saved(run):
    codes, text = run("run", "trainer.log_every_n_steps=7", faults={0: [bad_samples(76, 4)]})
    assert codes == [0], text
    (rewind,) = load_metrics(run.folder / "run").rewinds
    assert (rewind.step, rewind.spike_step) == (16, 20)
    saved = [record["saved_step"] for record in run.records("run", "checkpoint")]
    assert saved == [4, 8, 12, 16, 20, 24, 28, 30], "the one of step 20 came after the rewind"


def test_a_run_that_is_asked_to_end_in_a_spike_ends_at_the_checkpoint_before_it(uncut, run):
    every_fourth = "trainer.log_every_n_steps=4"
    codes, text = run("run", every_fourth, faults={0: [BAD_STEP, ["signal_at_step", 21, "SIGTERM"]]})
    assert codes == [75], text
    assert load_metrics(run.folder / "run").summary.step == run.newest("run").step == 16
    codes, text = run("run", faults={0: [BAD_STEP]})
    assert codes == [0], text
    assert curve(run.folder / "run")[-14:] == curve(uncut)[-14:]
    assert weights(run.folder / "run") == weights(uncut)


def test_samples_that_do_not_last_end_the_run(run):
    """Those of 5 steps were set aside, and the newest checkpoint that could be saved is 17 steps back."""
    fails = ["fail_saves", [20, 24, 28]]
    codes, text = run(
        "run",
        "trainer.max_spike_rewinds=1",
        "trainer.spike_margin=1",
        "checkpoint.on_save_error=continue",
        faults={0: [bad_samples(116, 4), fails]},
    )
    assert codes == [1], text
    assert "to pass over the samples since step 16 would leave the run 36 short" in text
    assert load_metrics(run.folder / "run").summary.end_reason == "loss_spike"
