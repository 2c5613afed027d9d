"""The doctor's answer as plain lines: it must not need a library that may be missing."""

from collections.abc import Iterator, Sequence

from gpt_pretrain.config.errors import counted
from gpt_pretrain.doctor.facts import Driver, Facts, Failure, Loaded, Torch
from gpt_pretrain.doctor.findings import Blocks
from gpt_pretrain.doctor.verdict import Verdict
from gpt_pretrain.features.registry import libraries

_SLOWER = "runs are slower without it"
_CONSEQUENCES = {Blocks.training: "no training", Blocks.fp8: "no FP8", Blocks.nothing: "note"}

type Row = tuple[str, str, str]


def answer_lines(facts: Facts, verdict: Verdict) -> Iterator[str]:
    """Whether training and FP8 work, what is here, and each finding with its command on a line to be copied."""
    yield f"training   {f'works on {verdict.device}' if verdict.trains else 'does not work'}"
    yield f"FP8        {_fp8(verdict)}"
    yield f"exit code  {verdict.exit_code}"
    yield from ("", "What is here")
    yield from _aligned([*_libraries(facts)])
    yield from ("", "FP8 recipes")
    yield from _aligned([(name, "no" if why else "yes", why or "") for name, why in verdict.recipes.items()])
    for finding in verdict.findings:
        yield from ("", f"{_CONSEQUENCES[finding.blocks]}: {finding.about} {finding.what}.")
        yield f"    {finding.fix}"


def _fp8(verdict: Verdict) -> str:
    usable = ", ".join(name for name, why in verdict.recipes.items() if why is None)
    if verdict.trains_in_fp8:
        return f"works: {usable}"
    if verdict.trains and usable:
        return f"does not work with Transformer Engine; model.fp8_backend=torchao works: {usable}"
    return "does not work"


def _aligned(rows: Sequence[Row]) -> Iterator[str]:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, remark in rows:
        yield f"  {name:{first}}  {value:{second}}  {remark}".rstrip()


def _libraries(facts: Facts) -> Iterator[Row]:
    """Name, version and remark of each library, and of the GPUs."""
    torch, driver, application = facts.torch, facts.driver, facts.application
    yield "Python", facts.python, facts.executable
    if isinstance(torch, Torch):
        yield "PyTorch", torch.version, "without CUDA" if torch.cuda is None else f"with CUDA {torch.cuda}"
    else:
        yield _library("PyTorch", torch)
    if isinstance(driver, Driver):
        yield "NVIDIA driver", driver.version, counted(len(driver.gpus), "GPU")
    else:
        yield "NVIDIA driver", *(("none", "") if driver.is_missing else ("?", driver.problem))
    if isinstance(torch, Torch) and torch.gpus:
        yield from _gpus(facts, torch)
    yield _library("Transformer Engine", facts.transformer_engine)
    for library in libraries():
        yield _library(library.title, facts.libraries[library.name], without=_SLOWER)
    yield _library("TorchAO", facts.torchao, without="its recipes are emulated only")
    yield _library("megatron-core", application, without="training does not load")
    yield _library("apex", facts.apex, without=_SLOWER)


def _library(name: str, library: Loaded | Failure, *, without: str = "") -> Row:
    """The row of a library; `without` says what runs lose if it is not installed."""
    if isinstance(library, Loaded):
        return name, library.version, library.remark
    # A finding says why.
    version = library.version or "?"
    return (name, "not installed", without) if library.is_missing else (name, version, "cannot be used")


def _gpus(facts: Facts, torch: Torch) -> Iterator[Row]:
    gpu = torch.gpus[0]
    capability = ".".join(map(str, gpu.compute_capability))
    bf16 = "BF16" if gpu.compute_capability >= (8, 0) else "no BF16"
    name = "GPU (assumed)" if facts.assumed_gpu is not None else "GPU"
    remark = f"compute capability {capability}, {bf16}, {gpu.memory_gib:.0f} GiB"
    yield name, f"{len(torch.gpus)} × {gpu.name}", remark
