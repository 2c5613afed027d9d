"""The doctor's answer as tables, readable at 100 columns, and a line for each fix, to be copied."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpt_pretrain.config.errors import counted
from gpt_pretrain.doctor.facts import Apex, Driver, Facts, Failure, Loaded, Torch, TorchAO, TransformerEngine
from gpt_pretrain.doctor.findings import Blocks
from gpt_pretrain.doctor.verdict import Verdict
from gpt_pretrain.features.registry import LIBRARIES
from gpt_pretrain.run.platform import MULTICAST_OFF

# Columns of the tables, unless the terminal is narrower.
WIDTH = 100
_GOOD, _HALF, _BAD = "bold green", "bold yellow", "bold red"
_STYLES = {Blocks.training: _BAD, Blocks.fp8: _HALF, Blocks.nothing: "bold cyan"}
_SLOWER = "runs are slower without it"
_CONSEQUENCES = {Blocks.training: "no training", Blocks.fp8: "no FP8", Blocks.nothing: "note"}


type Row = tuple[str, str, str]


def _libraries(facts: Facts) -> Iterator[Row]:
    """Name, version and remark of each library, and of the GPUs."""
    torch, driver, application = facts.torch, facts.driver, facts.application
    yield "Python", facts.python, facts.executable
    yield _library("PyTorch", torch)
    if isinstance(driver, Driver):
        newest = "" if driver.cuda is None else f"CUDA up to {'.'.join(map(str, driver.cuda))}, "
        yield "NVIDIA driver", driver.version, f"{newest}{counted(len(driver.gpus), 'GPU')}"
    else:
        yield "NVIDIA driver", *(("none", "") if driver.is_missing else ("?", driver.problem))
    if isinstance(torch, Torch) and torch.gpus:
        yield from _gpus(facts, torch)
    yield _library("Transformer Engine", facts.transformer_engine)
    for library in LIBRARIES:
        yield _library(library.title, facts.libraries[library.name], without=_SLOWER)
    yield _library("TorchAO", facts.torchao, without="its recipes are emulated only")
    if isinstance(application, Failure):
        yield "megatron-core", application.version or "not installed", "training does not load"
    else:
        yield "megatron-core", application.megatron_core, "training loads"
    yield _library("apex", facts.apex, without=_SLOWER)


def _library(
    name: str, library: Torch | TransformerEngine | Loaded | TorchAO | Apex | Failure, *, without: str = ""
) -> Row:
    """The row of a library; `without` says what runs lose if it is not installed."""
    if isinstance(library, Failure):
        # A finding says why.
        version = library.version or "?"
        return (name, "not installed", without) if library.is_missing else (name, version, "cannot be used")
    remark = "loads"
    if isinstance(library, Torch):
        parts = (("CUDA", library.cuda), ("cuDNN", library.cudnn), ("NCCL", library.nccl))
        built = ", ".join(f"{part} {version}" for part, version in parts if version is not None)
        remark = f"with {built}" if built else "without CUDA"
    elif isinstance(library, TransformerEngine):
        remark = f"with cuDNN {library.cudnn}, cuBLASLt {library.cublaslt}"
    elif isinstance(library, Apex):
        loaded = [part.removeprefix("apex_").replace("_", " ") for part, loads in library.parts.items() if loads]
        remark = ", ".join(loaded) or "none of its compiled parts load"
    return name, library.version, remark


def _gpus(facts: Facts, torch: Torch) -> Iterator[Row]:
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
    return Panel(grid, title=Text("doctor", style="bold"), title_align="left", width=WIDTH)


def print_verdict(facts: Facts, verdict: Verdict, console: Console) -> None:
    """Prints an answer."""
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
        # Not wrapped: it is to be copied.
        console.print(Text.assemble("    ", (finding.fix, "cyan")), soft_wrap=True)
        console.print()
