"""A slow rank makes a step equally long on all: its own passes tell which one it is, and its host is named."""

import re

import pytest

from gpt_pretrain.report.metrics_file import load_metrics
from tests.runs import run_small, small_run_arguments

SHORT = ("model.micro_batch_size=2", "trainer.limit_val_batches=0", "checkpoint.save_at_end=false")
JUDGED_S = 1.0
# More than a pass takes.
SPUN_S = 0.02
# Two ranks on each.
HOSTS = ("node1", "node1", "node2", "node2")


@pytest.fixture
def train(parent, tmp_path, cache_dir):
    """Trains with ranks that are judged after some seconds; returns what rank 0 has logged and printed."""

    def run(*overrides, num_ranks, num_steps, slow=None):
        faults = {rank: [["on_host", HOSTS[rank]], ["judge_soon", JUDGED_S]] for rank in range(num_ranks)}
        if slow is not None:
            faults[slow].append(["spin_in_passes", SPUN_S])
        overrides = [*SHORT, *overrides, f"trainer.max_steps={num_steps}"]
        arguments = small_run_arguments(tmp_path / "run", cache_dir, overrides)[2:]
        codes, text = parent.run(arguments, tmp_path / "output", num_ranks=num_ranks, faults=faults)
        assert codes == [0] * num_ranks, text
        return load_metrics(tmp_path / "run"), (tmp_path / "output.0").read_text()

    return run


@pytest.mark.parametrize(
    ("layout", "num_ranks", "slow", "named"),
    [
        pytest.param("single", 2, 1, {1}, id="DP2"),
        # Its neighbor waits for it within passes, and waiting takes no processor.
        pytest.param("tp2", 4, 2, {2}, id="TP2·DP2"),
        # The first two are one stage, which is not compared with the other.
        pytest.param("pp2", 4, 1, {1}, id="PP2·DP2"),
    ],
)
def test_a_slow_rank_is_named_with_its_host(layout, num_ranks, slow, named, train):
    metrics, printed = train(f"parallelism={layout}", num_ranks=num_ranks, num_steps=30, slow=slow)
    assert [record.step for record in metrics.rank_times] == list(range(1, 31))
    found = [rank for record in metrics.rank_times for rank in record.slowest if rank.is_slow]
    assert {(rank.rank, rank.host) for rank in found} == {(rank, HOSTS[slow]) for rank in named}
    assert min(rank.time_s for rank in found) > SPUN_S
    assert metrics.summary.slow_host == HOSTS[slow]
    assert 0 < metrics.summary.slow_host_share < 1
    (ratio, rank, host), *more = re.findall(r"^warning: (?=.*?([\d.]+) ×).*rank (\d+) on (\w+)", printed, re.MULTILINE)
    assert more == [], "a host is told once"
    assert (int(rank) in named, host, float(ratio) > 1.5) == (True, HOSTS[slow], True)
    assert re.search(rf"slow host: {HOSTS[slow]}, ", printed)


def test_equal_ranks_that_outnumber_the_cores_are_not_named(train):
    metrics, printed = train("parallelism=dp", num_ranks=4, num_steps=60)
    assert metrics.train[-1].time_unix - metrics.train[0].time_unix > JUDGED_S
    assert len(metrics.rank_times) == 60
    assert [record.warnings for record in metrics.rank_times if record.warnings] == []
    assert [record.slow_host for record in metrics.rank_times if record.slow_host] == []
    assert metrics.summary.slow_host is None
    assert "slowest" not in printed
    assert "slow host" not in printed


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        pytest.param(1, [], id="one process"),
        pytest.param(2, ["parallelism=tp2"], id="TP2"),
        pytest.param(2, ["parallelism=pp2"], id="PP2"),
        pytest.param(
            2, ["parallelism=ep2", "model.num_moe_experts=2", "model.moe_ffn_hidden_size=64"], id="EP2 of DP2"
        ),
    ],
)
def test_ranks_that_wait_for_each_other_in_their_passes_or_have_other_layers_are_not_compared(
    num_ranks, overrides, tmp_path, cache_dir
):
    metrics = run_small(num_ranks, tmp_path / "run", cache_dir, [*SHORT, *overrides, "trainer.max_steps=2"])
    assert metrics.rank_times == []
    assert metrics.summary.slow_host is None


def test_only_logged_steps_are_measured(train):
    metrics, _ = train("trainer.log_every_n_steps=4", num_ranks=2, num_steps=6)
    # The last step is logged, too, whose number nobody knew to be the last one's.
    assert [record.step for record in metrics.train] == [4, 6]
    assert [record.step for record in metrics.rank_times] == [4]
