"""The console: a line for each record, a progress bar on terminals, and numbers for people."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from gpt_pretrain.config.mixtures import ConsumedSource
from gpt_pretrain.report.columns import COLUMNS, format_count, format_duration, format_share
from gpt_pretrain.report.console import RunConsole, print_line
from gpt_pretrain.report.metrics_file import Metrics
from gpt_pretrain.report.records import (
    RECORD_KINDS,
    CheckpointRecord,
    ExpertsRecord,
    Fp8CoverageRecord,
    Fp8Record,
    Fp8Tensor,
    LossSpikeRecord,
    RankTime,
    RankTimesRecord,
    RewindRecord,
    SkippedStepRecord,
    SourcesRecord,
    StartRecord,
    TrainRecord,
    ValidationRecord,
)
from gpt_pretrain.report.summary import build_summary

RECORD = TrainRecord(
    step=120,
    consumed_samples=1920,
    consumed_tokens=491520,
    loss=4.32109,
    lr=2.5e-4,
    grad_norm=1.2345,
    skipped_steps=0,
    step_time_s=0.25,
    tokens_per_s=1234567.0,
    tokens_per_s_per_gpu=154320.9,
    tflops_per_gpu=512.3,
    mfu=0.518,
    memory_gib=71.25,
    eta_s=3725.0,
    time_unix=0.0,
)
CPU_RECORD = replace(RECORD, tokens_per_s=12345.6, tflops_per_gpu=None, mfu=None, memory_gib=1.25, grad_norm=None)
VALIDATION = ValidationRecord(step=100, loss=4.5, perplexity=90.017, num_samples=128, time_s=1.25)
SETS = replace(VALIDATION, losses={"web": 5.0, "code": 4.0}, set_bits_per_byte={"web": 1.5, "code": 1.25})

# From a layer's tensors, the fourth is to be left out: nothing of it saturates, and others flush more.
FP8_TENSORS = tuple(
    Fp8Tensor(
        layer=f"decoder.layers.{layer}.self_attention.linear_qkv",
        tensor=tensor,
        amax=amax,
        scale_min=4.48e7,
        scale_max=scale_max,
        saturated=saturated,
        flushed=flushed,
        amax_history_used=history,
    )
    for layer, tensor, amax, scale_max, saturated, flushed, history in (
        (0, "input", 3.0, 4.48e7, 0.0, 0.5, 16),
        (117, "output_gradient", 1.25e-5, 4.48e7, 0.0125, 0.0, 16),
        (2, "weight", None, 9.0e7, None, 0.75, None),
        (3, "input", 3.0, 4.48e7, 0.0, 0.25, 16),
    )
)
FP8 = Fp8Record(step=100, tensors=FP8_TENSORS, warnings=("layer 117 saturates; raise model.fp8_margin",))
COVERAGE = Fp8CoverageRecord(step=1, gemm_flops_share=0.875, parameter_bytes_share=0.0, time_s=0.25)

EXPERTS = ExpertsRecord(
    step=100, load_balancing_loss=1.0625, z_loss=None, busiest_expert=1.5, idlest_expert=0.0, idle_experts=3
)

SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"


def plain_output(show, max_steps=300):
    buffer = io.StringIO()
    with RunConsole(max_steps=max_steps, output=Console(file=buffer, force_terminal=False, width=80)) as console:
        show(console)
    return buffer.getvalue()


def terminal_console(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=60, legacy_windows=False)


def lines_of(output):
    """What a terminal console has written, without colours; a redraw starts new lines, as its cursor moves do."""
    written = re.sub(r"\r|\x1b\[\d*[AK]", "\n", output.file.getvalue())
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", written).splitlines()
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_is_printed_as_it_is(terminal):
    line = "run 1 (lr=:x: [b]): " + "x" * 100
    output = Console(file=io.StringIO(), width=40, force_terminal=terminal)
    print_line(output, line)
    assert output.file.getvalue() == line + "\n"


def test_a_terminal_has_the_lines_of_a_log_and_a_bar_below_them():
    output = terminal_console(width=80)
    with RunConsole(max_steps=300, output=output) as console:
        console.start_live()
        for record in (EXPERTS, RECORD, FP8):
            console.show(record)
    lines = lines_of(output)
    of_a_log = plain_output(lambda console: [console.show(record) for record in (EXPERTS, RECORD, FP8)])
    assert [line for line in lines if not re.match(r"step \d+/300 ━", line)] == of_a_log.splitlines()
    assert lines[0].startswith("step 0/300 ━")
    assert lines[-1].startswith("step 120/300 ━")


def history(num_records=30):
    train = [
        replace(RECORD, step=10 * k, consumed_tokens=40960 * k, loss=3.0 + 5.0 * math.exp(-k / 6))
        for k in range(1, num_records + 1)
    ]
    return Metrics(starts=[StartRecord(step=0, time_unix=0.0)], train=train, validation=[VALIDATION])


def summary(metrics, **changes):
    values = {
        "step": 300,
        "consumed_samples": 4800,
        "consumed_tokens": 1228800,
        "num_gpus": 8,
        "end_reason": "max_steps",
        "exit_code": 0,
        "wall_time_s": 99.4,
        "checkpoint": "outputs/run/checkpoints/step_300",
        "sample_prompt": "def ",
        "sample_text": "forward(self, x):\n    return x",
    }
    return build_summary(metrics, **(values | changes))


def warnings_of(record):
    *lines, end = plain_output(lambda console: console.show(record)).split("\n")
    assert end == ""
    assert all(line.startswith("warning: ") for line in lines)
    return [line.removeprefix("warning: ") for line in lines]


def numbers_of(sentence):
    return re.findall(r"-?\d+(?:\.\d+)?|nan|inf", sentence)


def test_steps_that_went_wrong_are_warned_of_with_their_samples():
    skipped = SkippedStepRecord(step=12, loss=math.nan, grad_norm=2.5, in_a_row=2, first_sample=96, num_samples=8)
    spike = LossSpikeRecord(step=13, loss=9.0, median=3.0, limit=4.0, first_sample=104, num_samples=8)

    assert [numbers_of(line) for line in warnings_of(skipped)] == [["12", "nan", "2.5000", "2", "96", "103"]]
    assert [numbers_of(line) for line in warnings_of(spike)] == [["13", "9.0000", "4.0000", "3.0000", "104", "111"]]


def test_a_rewind_is_told_with_what_it_passes_over_or_why_there_is_none():
    rewind = RewindRecord(
        step=300,
        spike_step=413,
        first_sample=2400,
        num_samples=904,
        rewinds=2,
        time_s=12.345,
        problem=None,
        warnings=("step_00000400 is passed over: damaged",),
    )
    before, went_back = warnings_of(rewind)
    assert before == rewind.warnings[0]
    assert numbers_of(went_back) == ["300", "413", "12.3", "2400", "3303", "2"]
    (stayed,) = warnings_of(replace(rewind, num_samples=0, problem="there is no checkpoint", warnings=()))
    assert numbers_of(stayed) == ["413"]
    assert stayed.endswith(": there is no checkpoint")


def test_a_checkpoint_is_shown_with_its_size_and_its_times_or_why_there_is_none():
    saved = CheckpointRecord(
        step=123, saved_step=120, num_bytes=21_000_000_000, stall_s=0.4321, time_s=12.345, problem=None
    )
    assert plain_output(lambda console: console.show(saved)) == (
        "checkpoint step 120/300 bytes 21000000000 stall_s 0.432 time_s 12.35\n"
    )
    assert warnings_of(replace(saved, num_bytes=0, problem="disk full")) == ["disk full"]


def test_sets_and_sources_are_shown_by_their_names():
    assert plain_output(lambda console: console.show(SETS)).endswith(
        "losses web=5.0000,code=4.0000 set_bits_per_byte web=1.5000,code=1.2500\n"
    )
    consumed = {"web": ConsumedSource(tokens=3000, epochs=0.75, documents=30)}
    assert plain_output(lambda console: console.show(SourcesRecord(step=120, sources=consumed))) == (
        "sources step 120/300 epochs web=0.7500\n"
    )


def test_of_the_slowest_ranks_only_warnings_are_shown():
    rank = RankTime(rank=5, host="node3", time_s=0.4, over_median=1.25, is_slow=True)
    record = RankTimesRecord(step=120, slowest_over_median=1.25, slowest=(rank,), warnings=())
    told = ("slowest: rank 5 on node3", "slowest: rank 0 on [node4]")
    assert warnings_of(record) == []
    assert warnings_of(replace(record, warnings=told)) == list(told)


def test_every_kind_of_record_is_shown():
    special = {"start", "summary", "skipped_step", "loss_spike", "rewind", "fp8", "rank_times"}

    assert {kind for kind, record in RECORD_KINDS.items() if record in COLUMNS} == set(RECORD_KINDS) - special


def test_a_log_has_one_stable_line_a_record():
    assert plain_output(lambda console: console.show(RECORD)) == (
        "step 120/300 loss 4.3211 lr 2.500e-04 grad_norm 1.234 step_time_s 0.2500 tokens_per_s 1234567 "
        "tflops_per_gpu 512.30 mfu 0.5180 memory_gib 71.25 eta 1:02:05\n"
    )
    assert plain_output(lambda console: console.show(CPU_RECORD)) == (
        "step 120/300 loss 4.3211 lr 2.500e-04 grad_norm - step_time_s 0.2500 tokens_per_s 12346 "
        "tflops_per_gpu - mfu - memory_gib 1.25 eta 1:02:05\n"
    )
    assert plain_output(lambda console: console.show(EXPERTS)) == (
        "experts step 100/300 load_balancing_loss 1.0625 z_loss - busiest_expert 1.50 idlest_expert 0.00 "
        "idle_experts 3\n"
    )
    assert plain_output(lambda console: console.show(VALIDATION)) == (
        "validation step 100/300 loss 4.5000 perplexity 90.02 num_samples 128 time_s 1.25 bits_per_byte -\n"
    )
    averaged = replace(VALIDATION, ema_loss=4.25)
    assert plain_output(lambda console: console.show(averaged)).endswith(" bits_per_byte - ema_loss 4.2500\n")


def test_a_log_names_the_tensors_that_fp8_treats_worst_and_warns():
    assert plain_output(lambda console: console.show(FP8)) == (
        "fp8 step 100/300 worst 1/4 layer decoder.layers.117.self_attention.linear_qkv tensor output_gradient "
        "saturated 0.0125 flushed 0 amax 1.250e-05 scale_min 4.480e+07 scale_max 4.480e+07 amax_history_used 16\n"
        "fp8 step 100/300 worst 2/4 layer decoder.layers.2.self_attention.linear_qkv tensor weight "
        "saturated - flushed 0.75 amax - scale_min 4.480e+07 scale_max 9.000e+07 amax_history_used -\n"
        "fp8 step 100/300 worst 3/4 layer decoder.layers.0.self_attention.linear_qkv tensor input "
        "saturated 0 flushed 0.5 amax 3.000e+00 scale_min 4.480e+07 scale_max 4.480e+07 amax_history_used 16\n"
        "warning: layer 117 saturates; raise model.fp8_margin\n"
    )
    assert plain_output(lambda console: console.show(COVERAGE)) == (
        "fp8_coverage step 1/300 gemm_flops_share 0.8750 parameter_bytes_share 0.0000 layers_kept_out none\n"
    )
    kept = replace(COVERAGE, layers_kept_out=tuple(f"decoder.layers.{layer}.mlp.linear_fc2" for layer in range(12)))
    assert plain_output(lambda console: console.show(kept)).endswith(" layers_kept_out mlp.linear_fc2×12\n")


def test_a_log_keeps_paths_and_brackets_as_they_are():
    path = "/scratch/" + "d" * 100 + "/[bold]run[/bold]"
    sections = {"run": {"directory": path}, "nothing": {}}

    def show(console):
        console.print_header("gpt [x]", sections)
        console.warning(f"{path} is :smile: slow")
        console.note("no apex")

    assert plain_output(show) == (
        f"gpt [x]\n[run]\n  directory: {path}\nwarning: {path} is :smile: slow\nnote: no apex\n"
    )


def test_a_log_ends_with_the_facts_and_the_sample():
    metrics = history()
    output = plain_output(lambda console: console.print_summary(summary(metrics), {"run": "outputs/run"}))
    facts = dict(re.findall(r"^  (\S.*?): (.*)$", output, re.M))

    assert output.startswith("end step 300/300: ")
    assert numbers_of(facts["train loss"]) == ["7.2324", "3.0337", "3.0337"]
    assert numbers_of(facts["validation loss"]) == ["4.5000"] * 3
    assert numbers_of(facts["tokens/s"]) == ["1.23", "154"]
    assert facts["run"] == "outputs/run"
    assert output.endswith("sample\ndef forward(self, x):\n    return x\n")
    assert "\x1b" not in output


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_gives_the_terminal_back(interruption):
    output = terminal_console(80)

    def interrupted_run():
        with RunConsole(max_steps=300, output=output) as console:
            console.start_live()
            console.show(RECORD)
            raise interruption

    with pytest.raises(interruption):
        interrupted_run()

    written = output.file.getvalue()
    assert HIDE_CURSOR in written
    assert written.rindex(SHOW_CURSOR) > written.rindex(HIDE_CURSOR)
    assert re.search(r"\n(\x1b\[\?25h)?$", written), "the shell's prompt starts on a line of its own"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_sample_cannot_steer_the_terminal(terminal):
    output = terminal_console(80) if terminal else Console(file=io.StringIO(), width=80)
    metrics = history()
    with RunConsole(max_steps=300, output=output) as console:
        console.print_summary(summary(metrics, sample_text="a\x1b[2Jb\x07c\r"), {})

    written = output.file.getvalue()
    assert "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c\N{REPLACEMENT CHARACTER}" in written
    assert "\x1b[2J" not in written


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.0512, "0.0512"), (7.0, "7"), (987, "987"), (999.9, "1k"), (1234567, "1.23M"),
     (999_960, "1M"), (70.6e9, "70.6B"), (15e12, "15T"), (math.inf, "inf"), (100, "100"), (1200, "1.2k"),
     (120_000, "120k")],
)  # fmt: skip
def test_counts_have_three_digits_and_a_unit(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.4, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (86400 * 3 + 14706, "3d 04:05:06"),
     (math.inf, "–")],
)  # fmt: skip
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "–"), (0.0, "0%"), (1e-6, "<0.001%"), (1e-5, "0.001%"), (0.00123, "0.12%"), (0.0996, "10%"),
     (0.3149, "31.5%"), (1.0, "100.0%")],
)  # fmt: skip
def test_shares_down_to_a_few_values_in_a_million(share, text):
    assert format_share(share) == text
