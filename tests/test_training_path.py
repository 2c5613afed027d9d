"""How a run gets from the command to its loss: through few files, and with everything resolved once."""

import pytest

from tests.runs import small_run_arguments

QUICK = ("trainer.max_steps=2", "trainer.limit_val_batches=0", "fp8=delayed", "model.fp8_emulate=true")


@pytest.fixture
def run(parent, tmp_path, cache_dir):
    def run_noting(fault, *overrides, **options):
        arguments = small_run_arguments(tmp_path / "run", cache_dir, [*QUICK, *overrides])
        noted = tmp_path / "noted"
        codes, text = parent.run(arguments[2:], tmp_path / "output", faults={0: [[fault, str(noted)]]}, **options)
        assert set(codes) == {0}, text
        return noted.read_text().splitlines()

    return run_noting


def test_the_loss_is_six_files_away_from_the_command(run):
    files = run("note_files_to_the_loss", "fp8=tensorwise")
    assert (files[0], files[-1]) == ("__main__.py", "training/step.py")
    # `summed_loss` itself is in one more.
    assert len({*files, "megatron/loss.py"}) <= 6, files


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [(1, ()), (2, ("parallelism=pp2",)), (1, ("checkpoint.save_at_end=true", "trainer.spike_threshold=null"))],
    ids=["one process", "two stages", "a run that saves"],
)
def test_a_run_is_resolved_once(num_ranks, overrides, run):
    askers = run("count_run_specs", *overrides, num_ranks=num_ranks)
    assert len(askers) == 1, askers
