"""gpt_pretrain.evaluate: scores of a checkpoint on tasks of lm-evaluation-harness.

Tasks of multiple choice, of likelihood and of perplexity are scored on the
model in memory; nothing is exported. FP8 models compute in BF16. One process
takes checkpoints of any parallel layout; torchrun or srun start several, which
share the documents, or the model as the run did. It prints a table and writes
the whole report to RUN_DIR/evaluations.

Exit codes: 0 done; 2 a mistake in what was given, or a damaged checkpoint;
1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.evaluate checkpoint=outputs/mine/checkpoints/step_00000300 tasks=[hellaswag,arc_easy]
    python -m gpt_pretrain.evaluate checkpoint=… tasks=[mine] include_path=my_tasks limit=100 num_fewshot=5
    torchrun --nproc-per-node 8 -m gpt_pretrain.evaluate checkpoint=… tasks=[mmlu] tensor_model_parallel_size=2
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_pretrain.commands.command import importing_torch, run_with_arguments
from gpt_pretrain.config.errors import ConfigError, UserError, list_argument, visible
from gpt_pretrain.config.facts import key
from gpt_pretrain.config.keys import section_keys
from gpt_pretrain.config.schema import EvaluationConfig
from gpt_pretrain.launch.ranks import Launch, read_launch
from gpt_pretrain.report.console import console_of_width, print_line
from gpt_pretrain.rules.check import model_problems
from gpt_pretrain.rules.evaluation import task_problems
from gpt_pretrain.run.products import resolve

if TYPE_CHECKING:
    from gpt_pretrain.checkpoint.saved_model import SavedModel
    from gpt_pretrain.config.schema import Config

_WIDTH = 120
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateArguments:
    """What the command takes."""

    checkpoint: str
    """A checkpoint's directory, RUN_DIR/checkpoints/step_…, of any parallel layout."""
    tasks: list[str]
    """Names of tasks, groups or tags: [hellaswag,arc_easy]."""
    num_fewshot: int | None = key(default=None, minimum=0)
    """Examples in each prompt, unless a task's own file says 0; null: what each task's file says."""
    limit: int | None = key(default=None, minimum=1)
    """The first documents of each task to score; null: all."""
    include_path: str | None = None
    """Folder of task files of your own, beside the library's. They may hold code; null: none."""
    tensor_model_parallel_size: int | None = key(default=None, minimum=1)
    """Ranks that share each layer; null: as in the checkpoint's run, or 1 in one process, as for the next three. The
    ranks that these leave share the documents."""
    pipeline_model_parallel_size: int | None = key(default=None, minimum=1)
    """Ranks that share the layers."""
    context_parallel_size: int | None = key(default=None, minimum=1)
    """Ranks that share each sequence."""
    expert_model_parallel_size: int | None = key(default=None, minimum=1)
    """Ranks that share the experts of a layer."""
    micro_batch_size: int = key(default=1, minimum=1)
    """Sequences of full length that a rank computes at once; it computes as many tokens of shorter ones."""
    out: str | None = None
    """File for the report; null: RUN_DIR/evaluations/CHECKPOINT_TIME.json, or beside a checkpoint that is in no run."""
    tokenizer: str | None = None
    """The model's tokenizer.json; null: found in the checkpoint or its run's directory."""
    extensions: list[str] = field(default_factory=list)
    """Modules of your own that the model needs: the one that registers its layer, [my_lab.layers]."""


def _problems(arguments: EvaluateArguments) -> Iterator[str]:
    if not arguments.tasks:
        yield "tasks=[] names nothing to evaluate; give tasks=[hellaswag,arc_easy] or others of lm-evaluation-harness"
    yield from task_problems(arguments.tasks, "tasks")
    for name, each in section_keys(EvaluateArguments).items():
        value = getattr(arguments, name)
        if each.facts.has_range and value is not None and (problem := each.facts.range_problem(value)) is not None:
            yield f"{name}={value} {problem}"


def _layout(arguments: EvaluateArguments, saved: "SavedModel", launch: Launch) -> "Config":
    """The configuration of the model in the layout that is asked for, or that the checkpoint's run had.

    Raises:
        ConfigError: The processes or the model do not fit it.
    """
    from gpt_pretrain.training.loaded_model import inference_config

    sizes = {name: getattr(arguments, name) for name in _SIZES}
    for name in _SIZES:
        if sizes[name] is None:
            sizes[name] = 1 if launch.world_size == 1 else getattr(saved.config.model, name)
    overrides = [f"model.{name}={size}" for name, size in sizes.items()]
    overrides.append(f"model.sequence_parallel={'true' if sizes[_SIZES[0]] > 1 else 'false'}")
    share = sizes[_SIZES[0]] * sizes[_SIZES[1]] * sizes[_SIZES[2]]
    batch = arguments.micro_batch_size * max(1, launch.world_size // share)
    overrides += [f"model.micro_batch_size={arguments.micro_batch_size}", f"model.global_batch_size={batch}"]
    config = inference_config(saved, overrides)
    if problems := list(model_problems(resolve(config, launch))):
        raise ConfigError(problems)
    return config


def evaluate(arguments: EvaluateArguments) -> None:
    """Prints the scores as a table and writes the report; every rank calls it."""
    if problems := list(_problems(arguments)):
        raise ConfigError(problems)
    launch = read_launch()
    with importing_torch():
        from gpt_pretrain.checkpoint.saved_model import open_checkpoint
        from gpt_pretrain.features.resolve import build_run_spec, detect_platform
        from gpt_pretrain.megatron.parallel import on_rank_zero, process_groups
        from gpt_pretrain.rules.machine import check_machine
        from gpt_pretrain.training.evaluation import Evaluation, write_results
        from gpt_pretrain.training.loaded_model import load_model

    saved = open_checkpoint(
        Path(arguments.checkpoint), None if arguments.tokenizer is None else Path(arguments.tokenizer)
    )
    if saved.tokenizer is None:
        raise UserError(
            f"{saved.path} is of a model without a tokenizer, and {list_argument('tasks', arguments.tasks)} are texts; "
            "give its file with tokenizer=…/tokenizer.json"
        )
    config = _layout(arguments, saved, launch)
    spec = build_run_spec(config, launch, detect_platform())
    check_machine(spec)
    settings = EvaluationConfig(
        tasks=arguments.tasks,
        interval=None,
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        include_path=arguments.include_path,
    )
    with process_groups(config.model, launch, spec.platform):
        evaluation = Evaluation(settings, saved.tokenizer, prefix="")
        on_rank_zero(saved.check_files)
        results = evaluation.run(load_model(saved, spec))
    if not launch.is_rank_zero:
        return
    console = console_of_width(_WIDTH)
    console.print(results.table())
    for warning in results.warnings:
        print_line(console, f"warning: {warning}")
    name = f"{saved.path.name}_{time.strftime('%Y-%m-%dT%H-%M-%S')}.json"
    out = Path(arguments.out) if arguments.out else folder_of_reports(saved.path) / name
    write_results(results, out, checkpoint=str(saved.path), step=saved.manifest.step)
    print_line(console, f"written: {visible(str(out))}")


def folder_of_reports(checkpoint: Path) -> Path:
    """In the checkpoint's run, or beside a checkpoint that is in no run, as an imported one."""
    folder = checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "evaluations"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(__doc__, EvaluateArguments, evaluate, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
