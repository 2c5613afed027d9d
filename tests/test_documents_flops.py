"""TFLOP/s count attention by the documents' lengths, in training and in the benchmark, so that MFU does not flatter."""

import io
import json
from dataclasses import replace

import numpy
import pytest
import torch
from rich.console import Console

from gpt_pretrain.benchmark.measure import Stopwatch
from gpt_pretrain.benchmark.results import compute_figures
from gpt_pretrain.config.derived import flops_per_token
from gpt_pretrain.config.schedule import num_train_samples
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.data.documents import expected_attended
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.optimizer import StepResult
from gpt_pretrain.plan.__main__ import main as plan
from gpt_pretrain.plan.document import WIDTH, plan_document, print_plan
from gpt_pretrain.plan.forecast import build_plan
from gpt_pretrain.run.products import resolve
from tests.platforms import CPU
from tests.refusals import compose_quickly
from tests.runs import SMALL_RUN, run_small, small_corpus
from tests.test_benchmark import H200, MEASURED

MASKED = "model.data.inter_document_masking=true"
# Of two steps each, since sums over steps are read at once.
RUN = (MASKED, "trainer.max_steps=4", "trainer.log_every_n_steps=2", "trainer.val_check_interval=null")


@pytest.fixture(scope="module")
def paragraphs(cache_dir):
    """A corpus of short documents."""
    small_corpus(cache_dir)
    path = cache_dir / "paragraphs.jsonl"
    with open(cache_dir / "sources.jsonl") as sources, open(path, "w") as file:
        for source in sources:
            for text in json.loads(source)["text"].split("\n\n"):
                file.write(json.dumps({"text": text}) + "\n")
    return f"model.data.text_files=[{path}]"


@pytest.mark.parametrize("layout", ["dp", "pp2"])
def test_a_run_counts_attention_by_the_lengths_of_its_documents(layout, tmp_path, cache_dir, paragraphs):
    parallel = [f"parallelism={layout}", "model.micro_batch_size=2", "model.encoder_seq_length=256", paragraphs]
    metrics = run_small(2, tmp_path / "run", cache_dir, [*RUN, *parallel, "trainer.limit_val_batches=0"])
    small = [each for each in SMALL_RUN if not each.startswith("trainer.val_check_interval=")]
    config = compose_quickly([*small, *small_corpus(cache_dir), *RUN, *parallel, "trainer.limit_val_batches=0"])
    samples = num_train_samples(config)
    data, _ = build_datasets(config, prepare_corpus(config, show_progress=False), num_train_samples=samples)
    model = config.model
    whole, width = flops_per_token(model), model.hidden_size
    assert len(metrics.train) == 2
    for number, record in enumerate(metrics.train):
        first, count = number * 2 * model.global_batch_size, 2 * model.global_batch_size
        # The odd numbers up to 2n - 1 sum up to n².
        squares = sum(int((2 * data[first + index]["position_ids"] + 1).sum()) for index in range(count))
        attended = squares / (count * 256)
        assert 2 < attended < 256, attended
        expected = whole - 3 * model.num_layers * 2 * width * (256 - attended)
        assert 2 * record.tflops_per_gpu * 1e12 / record.tokens_per_s == pytest.approx(expected, rel=1e-5)
        assert record.consumed_flops == pytest.approx(expected * record.consumed_tokens, rel=1e-5)


def test_the_forecast_is_the_mean_over_all_places_where_samples_begin():
    """By hand, of the documents end to end; the forecast takes lengths for continuous."""
    lengths = numpy.random.default_rng(5).integers(1, 300, 400)
    documents = numpy.repeat(numpy.arange(len(lengths)), lengths)
    squares = []
    for first in range(0, 100, 5):
        samples = documents[first:][: (len(documents) - first) // 100 * 100].reshape(-1, 100)
        squares.append(sum((numpy.unique(each, return_counts=True)[1] ** 2).sum() for each in samples) / samples.size)
    assert expected_attended(lengths, 100) == pytest.approx(numpy.mean(squares), rel=1e-2)
    assert expected_attended(numpy.array([1_000_000]), 100) == pytest.approx(100, rel=1e-3)
    assert expected_attended(numpy.array([3, 3, 3]), 1_000_000) == pytest.approx(3)


def test_the_data_forecast_what_steps_count(tmp_path, cache_dir, paragraphs):
    overrides = [MASKED, paragraphs, "model.encoder_seq_length=256", "trainer.limit_val_batches=0"]
    config = compose_quickly(
        [*(each for each in SMALL_RUN if "val_check" not in each), *small_corpus(cache_dir), *overrides]
    )
    data, _ = build_datasets(config, prepare_corpus(config, show_progress=False), num_train_samples=400)
    seen = sum(int((2 * data[index]["position_ids"] + 1).sum()) for index in range(400)) / (400 * 256)
    assert data.attended == pytest.approx(seen, rel=0.05)
    plain = compose_quickly(
        [*(each for each in SMALL_RUN if "val_check" not in each), *small_corpus(cache_dir), *overrides[1:]]
    )
    assert build_datasets(plain, prepare_corpus(plain, show_progress=False), num_train_samples=9)[0].attended == 256


def results(squares):
    loss = torch.tensor([4.0, 2.0])
    for each in squares:
        found = None if each is None else torch.tensor([each])
        yield StepResult(loss_sum_and_tokens=loss, grad_norm=loss[:1], skipped=loss[0] < 0, squared_lengths=found)


def test_the_benchmark_counts_the_documents_of_timed_steps():
    config = compose_quickly(["model=gpt2_124m", "fp8=delayed", MASKED])
    model = config.model
    masked = compute_figures([[replace(MEASURED, attended=100.0)]], resolve(config), H200)
    plain = compute_figures([[MEASURED]], resolve(config), H200)
    less = 3 * model.num_layers * 2 * model.hidden_size * (model.encoder_seq_length - 100)
    rate = plain.tokens_per_s_per_gpu / 1e12
    assert masked.tflops_per_gpu == pytest.approx(plain.tflops_per_gpu - less * rate)
    # More of what is left is in FP8, whose ceiling is higher.
    assert masked.fp8_flops_share > plain.fp8_flops_share
    assert masked.mfu < plain.mfu * masked.tflops_per_gpu / plain.tflops_per_gpu


@pytest.mark.parametrize(("squares", "expected"), [([9.0, 9.0, 4.0, 6.0], 5.0), ([None] * 4, None)])
def test_a_stopwatch_leaves_warmup_steps_out(squares, expected, compose_config):
    install_cpu_device()
    config = compose_config("benchmark.warmup_steps=2", "benchmark.steps=2", "benchmark.interval=1")
    watch = Stopwatch(config.benchmark, platform=CPU, launched_unix=0.0, profiler=None)
    for step, result in enumerate(results(squares), start=1):
        watch.after_step(step, result)
    assert watch.squared_lengths == expected


def plan_of(*overrides):
    # Larger microbatches than the preset's, so that no step waits for the host.
    return build_plan(compose_quickly(["model=gpt2_124m", "model.micro_batch_size=128", "fp8=delayed", *overrides]))


def test_the_plan_forecasts_attention_of_the_documents_that_it_is_told():
    whole, told = plan_of(MASKED), plan_of(MASKED, "plan.document_length=256")
    model = whole.spec.model
    # A quarter of each sample.
    less = 3 * model.num_layers * 2 * model.hidden_size * (1024 - 256)
    assert whole.flops_per_token == plan_of().flops_per_token
    assert told.flops_per_token == pytest.approx(whole.flops_per_token - less)
    attention = [plan.speed.run.seconds["attention"] for plan in (whole, told)]
    launches = attention[0] - (attention[0] - attention[1]) * 4 / 3
    assert 0 < launches < attention[1] / 10
    assert told.speed.run.step_s < whole.speed.run.step_s
    # More of what is left is in FP8.
    assert told.fp8_flops_share > whole.fp8_flops_share
    assert plan_document(told)["fp8_flops_share"] == told.fp8_flops_share
    assert told.memory == whole.memory


def test_the_plan_says_what_lengths_it_assumed():
    def printed(*overrides):
        console = Console(file=io.StringIO(), width=WIDTH)
        print_plan(plan_of(*overrides), console)
        return " ".join(console.file.getvalue().split())

    assumed = "samples of one document each"
    assert assumed in printed(MASKED)
    assert assumed not in printed(MASKED, "plan.document_length=256")
    assert "256 tokens, of plan.document_length" in printed(MASKED, "plan.document_length=256")
    assert assumed not in printed()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["plan.document_length=256"], "model.data.inter_document_masking"),
        ([MASKED, "plan.document_length=0"], "plan.document_length=0"),
        ([MASKED, "plan.document_length=2000"], "model.encoder_seq_length=1024"),
    ],
)
def test_lengths_that_nothing_reads_or_no_sample_holds_are_refused(overrides, expected, capsys, tmp_path):
    assert plan(["model=gpt2_124m", "data=mock", f"run_dir={tmp_path}", *overrides]) == 2
    told = capsys.readouterr().err
    assert "plan.document_length" in told
    assert expected in told
