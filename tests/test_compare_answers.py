"""Verdicts on runs whose gap, speed and noise are known."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from gpt_pretrain.compare.answers import compare_runs, judge
from gpt_pretrain.compare.comparability import identity
from gpt_pretrain.compare.comparison import Comparison, Gate, Interval
from gpt_pretrain.compare.console import print_comparison
from gpt_pretrain.compare.intervals import t_quantile
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.keys import schema_keys
from tests.synthetic_runs import SHARED, power_law, synthetic_run

NO_DEMANDS = {"max_loss_gap": None, "min_speedup": None}


def compare(*runs, **demands):
    gate = Gate(**NO_DEMANDS | demands) if demands else None
    return compare_runs(runs, command="", gate=gate)


def answer(*runs, **demands):
    return compare(*runs, **demands).answers[0]


def seeds(variant, gaps, **fields):
    """A run for each seed's relative loss."""
    return [synthetic_run(variant, seed, gap=gap, **fields) for seed, gap in enumerate(gaps)]


BASELINE = seeds("bf16", (0.0, 0.001, -0.001))


def test_the_gap_and_its_paired_interval_are_those_calculated_by_hand():
    gaps = (0.002, 0.0045, 0.0005)
    found = answer(*BASELINE, *seeds("fp8", gaps))
    logs = [math.log((1 + ours) / (1 + theirs)) for ours, theirs in zip(gaps, (0, 0.001, -0.001), strict=True)]
    mean = sum(logs) / 3
    width = t_quantile(2) * math.sqrt(sum((each - mean) ** 2 for each in logs) / 2 / 3)

    assert found.noise_from == "paired seeds"
    assert found.loss_gap.value == pytest.approx(math.expm1(mean), rel=1e-9)
    assert found.loss_gap.low == pytest.approx(math.expm1(mean - width), rel=1e-9)
    assert found.loss_gap.high == pytest.approx(math.expm1(mean + width), rel=1e-9)
    # A constant ratio is the same all along.
    assert found.gap_curve.gaps == pytest.approx([found.loss_gap.value] * 101)
    assert found.gap_curve.lows == pytest.approx([found.loss_gap.low] * 101)
    assert found.gap_curve.steps[-1] == 975


def test_further_variants_tell_the_noise_where_they_share_seeds_and_ground():
    ours, quiet = seeds("fp8", (0.002, 0.0045, 0.0005)), seeds("quiet", (0.0, 0.001, -0.001))

    def width(*beside):
        gap = answer(*BASELINE, *ours, *beside).loss_gap
        return gap.high - gap.low

    # Of three variants two are the same: twice the degrees of freedom, and two thirds of the variance.
    assert width(*quiet) == pytest.approx(width() * t_quantile(4) / t_quantile(2) * math.sqrt(2 / 3), rel=0.01)
    strangers = {
        "other seeds": [replace(run, seed=run.seed + 10) for run in quiet],
        "one seed less": quiet[:2],
        "shorter": seeds("quiet", (0.0, 0.001, -0.001), steps=800),
        "diverged": [
            synthetic_run("quiet", seed, noise=lambda step: math.nan if step > 900 else 0.0) for seed in range(3)
        ],
        "other data": seeds("quiet", (0.0, 0.001, -0.001), settings={**SHARED, "model.data.data_impl": "n"}),
    }
    for why, runs in strangers.items():
        assert width(*runs) == pytest.approx(width()), why


def test_seeds_that_differ_are_not_paired():
    others = [replace(run, seed=run.seed + 10) for run in seeds("fp8", (0.002, 0.003, 0.001))]
    assert answer(*BASELINE, *others).noise_from == "seeds"


def test_the_time_to_a_loss_is_that_of_the_power_law():
    # A loss 1% higher is caught up at 1.01^(1/0.13) times the tokens; each token takes 0.8 times as long.
    found = answer(*BASELINE, *seeds("fp8", (0.01, 0.011, 0.009), s_per_step=0.8))
    time = found.time_to_loss

    assert time.speedup.value == pytest.approx(1.25 / 1.01 ** (1 / 0.13), rel=0.01)
    assert time.speedup.low < time.speedup.value < time.speedup.high
    assert time.baseline_gpu_s / time.gpu_s == pytest.approx(time.speedup.value)
    # The loss at 975 steps of the variant, 1% above the baseline's.
    assert time.loss == pytest.approx(power_law(975_000) * 1.011, rel=1e-3)
    assert time.gpu_s == pytest.approx(0.8 * 975, rel=0.02)


NAN = synthetic_run("fp8", 1, loss=lambda x: math.nan if x > 500_000 else power_law(x))
UNTIMED = replace(synthetic_run("bf16", 1).training, gpu_seconds=())
FALLING = replace(
    synthetic_run("fp8", 1).training, tokens=tuple(5000 * max(1, i % 100 + 2 * (i > 198) * 100) for i in range(200))
)
OTHER_BATCH = {**SHARED, "model.global_batch_size": "16"}

CASES = {
    "as good and sooner": (seeds("fp8", (0.0005, 0.0, 0.0), s_per_step=0.8), "as_good", "sooner"),
    "as good, but later": (seeds("fp8", (0.0005, 0.0, 0.0), s_per_step=1.25), "as_good", "1.2"),
    "a gap that is real and does not count": (seeds("fp8", (0.002, 0.003, 0.001)), "as_good", "+0.2%"),
    "better": (seeds("fp8", (-0.01, -0.009, -0.011)), "better", "-1%"),
    "worse": (seeds("fp8", (0.01, 0.011, 0.009)), "worse", "worse"),
    "diverged": ([NAN], "worse", "not finite"),
    "more noise than the gap that counts": (seeds("fp8", (0.02, -0.02, 0.0)), "cannot_tell", "seeds"),
    "one seed against three": ([synthetic_run("fp8", 1, gap=0.002)], "cannot_tell", "run longer or more seeds"),
    "no common tokens": ([synthetic_run("fp8", 1, first=2000)], "cannot_tell", "overlap"),
    "hardly begun": ([synthetic_run("fp8", 1, steps=50)], "cannot_tell", "10 logged losses"),
    "no cross entropy": ([synthetic_run("fp8", 1, gap=-2.0)], "cannot_tell", "no cross entropy"),
    "tokens that fall": ([synthetic_run("fp8", 1, training=FALLING)], "cannot_tell", "do not rise"),
    "another batch": ([synthetic_run("fp8", 1, settings=OTHER_BATCH)], "not_comparable", "16"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_verdict_says_what_the_runs_show(case):
    runs, judgement, words = CASES[case]
    comparison = compare(*BASELINE, *runs)
    (found,) = comparison.answers

    assert found.judgement == judgement
    assert words in found.sentence
    assert "fp8" in found.sentence
    # JSON's values, as a NaN equals nothing.
    assert Comparison.from_json(comparison.to_json()).to_json() == comparison.to_json()


def test_one_seed_of_each_tells_no_noise():
    (found,) = compare(synthetic_run("bf16", 1), synthetic_run("fp8", 1, gap=0.001)).answers
    assert (found.judgement, found.noise_from, found.gap_curve.lows) == ("cannot_tell", "none", ())


def test_times_that_differ_beyond_all_bounds_leave_any_time_open():
    ours = [synthetic_run("fp8", seed, s_per_step=pace) for seed, pace in enumerate((1, 100))]
    comparison = compare(*seeds("bf16", (0.0, 0.0)), *ours, min_speedup=0.01)
    (found,) = comparison.answers
    assert (found.speedup.low, found.speedup.high) == (pytest.approx(0), math.inf)
    assert "its interval begins at 0.000" in comparison.gate.missed[0]
    assert Comparison.from_json(comparison.to_json()) == comparison


def test_a_diverged_baseline_tells_nothing_of_the_others():
    found = answer(replace(NAN, variant="bf16", name="bf16"), synthetic_run("fp8", 1))
    assert found.judgement == "cannot_tell"
    assert "bf16" in found.reasons[0]


def test_a_skipped_step_is_left_out():
    run = synthetic_run("fp8", 1)
    losses = (*run.training.losses[:100], math.inf, *run.training.losses[101:])
    found = answer(*BASELINE, replace(run, training=replace(run.training, losses=losses)))
    assert abs(found.loss_gap.value) < 1e-6


def test_runs_of_other_lengths_are_compared_as_far_as_both_go():
    found = answer(*BASELINE, *seeds("fp8", (0.002, 0.003, 0.001), steps=600))
    assert found.loss_gap.value == pytest.approx(0.002, abs=1e-5)
    assert found.gap_curve.steps[-1] == 585
    assert "shortest" in found.reasons[0]


def test_logs_without_times_or_tokens_are_compared_over_steps():
    runs = [synthetic_run("fp8", 1, training=replace(UNTIMED, tokens=())), synthetic_run("fp8", 2)]
    found = answer(*BASELINE, *runs)
    assert found.time_to_loss is None
    assert found.gap_curve.steps[-1] == 975
    assert "fp8 seed 1" in found.reasons[0]


@pytest.mark.parametrize(
    ("gap", "told"), [(1.2, "+120%"), (2.675, "+270%"), (-0.5, "-50%"), (0.0021, "+0.21%"), (-1e-9, "+0%")]
)
def test_a_gap_is_told_without_exponents(gap, told):
    sentence = answer(synthetic_run("bf16", 1), synthetic_run("fp8", 1, gap=gap)).sentence
    assert f"final loss {told}; " in sentence


@pytest.mark.parametrize("name", ["x [/b]", "data=[a,b]", ":smile:"])
def test_a_name_is_shown_as_it_is(name):
    output = io.StringIO()
    print_comparison(compare(synthetic_run(name, 1), synthetic_run("fp8", 1)), Console(file=output, width=120))
    title, _, _, row = output.getvalue().splitlines()[:4]
    assert title.rstrip() == f"against {name}"
    assert row.split(" │ ")[0].strip() == name


def test_what_differs_is_told_before_any_number():
    ours = synthetic_run("fp8", 1, settings={**OTHER_BATCH, "model.fp8": "true", "run_dir": "there"})
    theirs = synthetic_run("bf16", 1, settings={**SHARED, "model.fp8": "false", "run_dir": "here"})
    comparison = compare(theirs, ours)
    (obstacle,) = comparison.obstacles

    assert (obstacle.run, obstacle.key) == ("fp8 seed 1", "model.global_batch_size")
    assert (obstacle.baseline_value, obstacle.value) == ("8", "16")
    assert {each.key: each.values for each in comparison.differences} == {
        "model.global_batch_size": ("8", "16"),
        "model.fp8": ("false", "true"),
    }
    assert comparison.answers[0].loss_gap is None


def test_the_same_file_may_lie_elsewhere():
    runs = [
        synthetic_run(name, 1, settings={**SHARED, "model.data.data_prefix": f"['/{name}/web', '/x/{file}']"})
        for name, file in (("bf16", "code"), ("fp8", "code"), ("fp8_other", "books"))
    ]
    assert [each.run for each in compare(*runs).obstacles] == ["fp8_other seed 1"]


# Keys of the model that change how it is trained, not what a loss means.
MAY_DIFFER = re.compile(
    r"model\.(seed|micro_batch_size|fp8\w*|\w*_in_bf16|first_last_layers_bf16|\w*parallel\w*|overlap_\w+|\w*_overlap"
    r"|use_distributed_optimizer|num_distributed_optimizer_instances|outer_dp_sharding_strategy|ddp_bucket_size"
    r"|grad_reduce_in_fp32|transformer_engine|\w*_fusion(_impl)?"
    r"|use_flash_attention|fused_single_qkv_rope|features|compile|cuda_graph_impl|activations_checkpoint_\w+|optim\..+"
    r"|data\.(cache_dir|num_\w+|max_epochs)|make_vocab_size_divisible_by|max_position_embeddings|layernorm_epsilon"
    r"|init_method_std|z_loss_coeff|qk_clip\w*|log_max_attention_logit|use_mup|mup_\w+|\w+_dropout|moe_(router_load|router_padding|aux_loss|z_loss|token|grouped)\w*)"
)


def test_each_key_of_the_model_is_what_must_be_equal_or_may_differ():
    shared = {key for keys in identity().values() for key in keys}
    others = {key for key in schema_keys() if key.startswith("model.")} - shared
    assert [key for key in others if not MAY_DIFFER.fullmatch(key)] == []
    assert [key for key in shared if MAY_DIFFER.fullmatch(key)] == []


def test_what_a_log_does_not_tell_is_named():
    silent = replace(synthetic_run("log", 1), configuration={"model.global_batch_size": "8"})
    (unchecked,) = compare(synthetic_run("bf16", 1), silent).unchecked
    assert all(word in unchecked for word in ("log seed 1", "data", "tokenizer", "model"))
    assert "batch" not in unchecked


def test_runs_of_one_variant_alone_are_refused():
    with pytest.raises(UserError, match="bf16"):
        compare(*BASELINE)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.02, -0.01, "better"),
        (-0.01, 0.004, "as_good"),
        (0.001, 0.005, "as_good"),
        (0.001, 0.006, "worse"),
        (-0.001, 0.006, "cannot_tell"),
        (None, None, "cannot_tell"),
    ],
)
def test_a_judgement_takes_the_whole_interval(low, high, expected):
    assert judge(Interval(value=0.0, low=low, high=high), 0.005) == expected


@pytest.mark.parametrize(
    ("gaps", "demands", "missed"),
    [
        ((0.0005, 0.0, 0.0), {"max_loss_gap": 0.005, "min_speedup": 1.1}, []),
        ((0.01, 0.011, 0.009), {"max_loss_gap": 0.005}, ["compare.max_loss_gap=0.5%"]),
        ((0.01, 0.011, 0.009), {"max_loss_gap": 0.02}, []),
        ((0.0005, 0.0, 0.0), {"min_speedup": 1.3}, ["compare.min_speedup=1.3"]),
        # Noise that leaves either open: nobody can say that the demands are met.
        ((0.02, -0.02, 0.0), {"max_loss_gap": 0.005, "min_speedup": 1.2}, ["max_loss_gap", "min_speedup"]),
        ((0.0,), {"max_loss_gap": 0.01, "min_speedup": 1.2}, []),
    ],
)
def test_a_gate_is_passed_by_the_whole_interval(gaps, demands, missed):
    gate = compare(*BASELINE, *seeds("fp8", gaps, s_per_step=0.8), **demands).gate
    assert len(gate.missed) == len(missed)
    assert all(key in problem for key, problem in zip(missed, gate.missed, strict=True))


def test_no_demand_is_no_gate_and_a_gate_without_an_answer_is_missed():
    assert compare(*BASELINE, *seeds("fp8", (0.0,))).gate is None
    one_each = compare(synthetic_run("bf16", 1), synthetic_run("fp8", 1), max_loss_gap=0.1, min_speedup=0.5)
    other = compare(*BASELINE, synthetic_run("fp8", 1, settings=OTHER_BATCH), max_loss_gap=0.1, min_speedup=0.5)
    assert [len(each.gate.missed) for each in (one_each, other)] == [2, 2]
