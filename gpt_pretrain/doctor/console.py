"""The doctor's answer as tables, readable at 100 columns; a fix is a line of its own, to be copied."""

import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpt_pretrain.doctor.facts import Apex, Blocks, Driver, Facts, Failure, Torch, TransformerEngine
from gpt_pretrain.doctor.verdict import Verdict
from gpt_pretrain.spec.platform import MULTICAST_OFF

# The width where the terminal does not say, and at most.
_WIDTH = 100
_GOOD, _HALF, _BAD = "bold green", "bold yellow", "bold red"
_STYLES = {Blocks.training: _BAD, Blocks.fp8: _HALF, Blocks.nothing: "bold cyan"}
_SLOWER = "runs are slower without it"
_CONSEQUENCES = {Blocks.training: "no training", Blocks.fp8: "no FP8", Blocks.nothing: "note"}


def _failed(failure: Failure, without: str = "") -> tuple[str, str]:
    """Version and remark; `without` says what runs lose where the library is not installed."""
    # A finding says why.
    return ("not installed", without) if failure.is_missing else (failure.version or "?", "cannot be used")


def _libraries(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Name, version and remark of each library, and of the GPUs."""
    yield "Python", facts.python, facts.executable
    torch, driver, application = facts.torch, facts.driver, facts.application
    te, apex = facts.transformer_engine, facts.apex
    if isinstance(torch, Torch):
        libraries = (("CUDA", torch.cuda), ("cuDNN", torch.cudnn), ("NCCL", torch.nccl))
        built = ", ".join(f"{name} {version}" for name, version in libraries if version is not None)
        yield "PyTorch", torch.version, f"with {built}" if built else "without CUDA"
    else:
        yield "PyTorch", *_failed(torch)
    if isinstance(driver, Driver):
        newest = "" if driver.cuda is None else f"CUDA up to {'.'.join(map(str, driver.cuda))}, "
        yield "NVIDIA driver", driver.version, f"{newest}{len(driver.gpus)} GPU(s)"
    else:
        yield "NVIDIA driver", *(("none", "") if driver.is_missing else ("?", driver.problem))
    if isinstance(torch, Torch) and torch.gpus:
        yield from _gpus(facts, torch)
    if isinstance(te, TransformerEngine):
        yield "Transformer Engine", te.version, f"with cuDNN {te.cudnn}, cuBLASLt {te.cublaslt}"
    else:
        yield "Transformer Engine", *_failed(te)
    for name, library, without in (
        ("FlashAttention-4", facts.flash_attention, _SLOWER),
        ("TorchAO", facts.torchao, "its recipes are emulated only"),
    ):
        yield name, *(_failed(library, without) if isinstance(library, Failure) else (library.version, "loads"))
    if isinstance(application, Failure):
        yield "megatron-core", application.version or "not installed", "training does not load"
    else:
        yield "megatron-core", application.megatron_core, "training loads"
    if isinstance(apex, Apex):
        parts = ", ".join(part.removeprefix("apex_").replace("_", " ") for part, loads in apex.parts.items() if loads)
        yield "apex", apex.version, parts or "none of its compiled parts load"
    else:
        yield "apex", *_failed(apex, _SLOWER)


def _gpus(facts: Facts, torch: Torch) -> Iterator[tuple[str, str, str]]:
    gpu = torch.gpus[0]
    capability = ".".join(map(str, gpu.compute_capability))
    bf16 = "BF16" if gpu.compute_capability >= (8, 0) else "no BF16"
    peers = {None: "", True: ", each reaches the other's memory", False: ", no access to each other's memory"}
    name = "GPU (assumed)" if facts.assumed_gpu is not None else "GPU"
    remark = f"compute capability {capability}, {bf16}, {gpu.memory_gib:.0f} GiB{peers[torch.peer_access]}"
    yield name, f"{len(torch.gpus)} × {gpu.name}", remark
    multicast = [f"{name}={facts.environment[name]}" for name in MULTICAST_OFF if name in facts.environment]
    yield "NVLink multicast", "", ", ".join(multicast) or "as the libraries choose (no variable is set)"


def _table(title: str, *columns: str, whole: int = 1) -> Table:
    """A table whose first `whole` columns are not wrapped."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=index < whole)
    return table


def _answer(verdict: Verdict) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    usable = [name for name, why in verdict.recipes.items() if why is None]
    if verdict.trains:
        grid.add_row("training", Text.assemble(("works", _GOOD), f" on {verdict.device}"))
    else:
        grid.add_row("training", Text("does not work", _BAD))
    if verdict.trains_in_fp8:
        grid.add_row("FP8", Text.assemble(("works", _GOOD), f": {', '.join(usable)}"))
    elif verdict.trains and usable:
        text = f" with Transformer Engine; model.fp8_backend=torchao works: {', '.join(usable)}"
        grid.add_row("FP8", Text.assemble(("does not work", _HALF), text))
    else:
        grid.add_row("FP8", Text("does not work", _HALF if verdict.trains else _BAD))
    grid.add_row("exit code", str(verdict.exit_code))
    return Panel(grid, title=Text("doctor", style="bold"), title_align="left", width=_WIDTH)


def print_verdict(facts: Facts, verdict: Verdict) -> None:
    """Prints an answer to standard output, 100 columns wide or as narrow as the terminal."""
    console = Console(highlight=False, emoji=False)
    console.width = min(console.width, _WIDTH) if sys.stdout.isatty() else _WIDTH
    libraries = _table("What is here", "", "version", "", whole=2)
    for row in _libraries(facts):
        libraries.add_row(*map(Text, row))
    recipes = _table("FP8 recipes", "fp8=", "runs", "because")
    # Each reason once, with all recipes that it stops.
    for why in dict.fromkeys(verdict.recipes.values()):
        names = [name for name, reason in verdict.recipes.items() if reason == why]
        runs = Text("no", "yellow") if why else Text("yes", "green")
        recipes.add_row("\n".join(names), runs, Text(why or ""))
    parts = _table("What each part of a run runs on", "part", "here", "first, next and last choice")
    for part in verdict.parts:
        parts.add_row(part.name, Text(part.here), Text(part.order, style="dim"))
    console.print(_answer(verdict))
    for table in (libraries, recipes, parts):
        if table.row_count:
            console.print(table)
    for finding in verdict.findings:
        label = (f"{_CONSEQUENCES[finding.blocks]}: ", _STYLES[finding.blocks])
        console.print(Text.assemble(label, (finding.about, "bold"), f" {finding.what}."))
        if finding.fix is not None:
            # Not wrapped: it is to be copied.
            console.print(Text.assemble("    ", (finding.fix, "cyan")), soft_wrap=True)
        console.print()
