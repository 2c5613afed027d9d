"""How good the plan is: runs configurations on this machine's GPUs and compares memory and speed with the forecast.

    python benchmarks/plan_accuracy.py --steps 30 --interval 10 \
        "model=gpt2_124m" "model=gpt3_1_3b fp8=delayed model.global_batch_size=64"

Each argument is one command line; `--nproc N` starts each with torchrun on N processes. Printed is a Markdown row for
each: the peak of torch's allocator on rank 0 against that of pipeline stage 0, and tokens/s per GPU (the median of the
intervals after the first) against the roofline's. A run of `fp8=…` after the same one without gives their ratio, too.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def launch(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")


def plan(nproc: int, overrides: list[str], run_dir: Path) -> tuple[float, float]:
    """GiB and tokens/s per GPU, forecast."""
    arguments = [*overrides, f"plan.num_gpus={nproc}", f"run_dir={run_dir}"]
    launch([sys.executable, "-m", "gpt_pretrain.plan", *arguments])
    document = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    return document["memory"]["stages"][0]["peak"] / 2**30, document["speed"]["tokens_per_s_per_gpu"]


def run(nproc: int, overrides: list[str], run_dir: Path, steps: int, interval: int) -> tuple[float, float]:
    """GiB and tokens/s per GPU, measured."""
    command = [sys.executable]
    if nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    short = [
        f"run_dir={run_dir}",
        f"trainer.max_steps={steps}",
        f"trainer.log_every_n_steps={interval}",
        "trainer.limit_val_batches=0",
        "checkpoint.save_at_end=false",
        "sample.max_new_tokens=0",
    ]
    launch([*command, "-m", "gpt_pretrain", *overrides, *short])
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    speeds = [record["tokens_per_s_per_gpu"] for record in records[1:]]
    return records[-1]["memory_gib"], statistics.median(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("command_lines", nargs="+")
    arguments = parser.parse_args()
    if arguments.steps < 2 * arguments.interval:
        parser.error("--steps must hold at least two intervals: the first warms up and is left out")
    print("| configuration | peak, measured | forecast | | tokens/s/GPU, measured | forecast | |")
    print("|---|---|---|---|---|---|---|", flush=True)
    before: tuple[list[str], float, float] | None = None
    for line in arguments.command_lines:
        overrides = ["data=mock", *shlex.split(line)]
        with tempfile.TemporaryDirectory() as folder:
            memory, speed = plan(arguments.nproc, overrides, Path(folder) / "plan")
            used, reached = run(arguments.nproc, overrides, Path(folder) / "run", arguments.steps, arguments.interval)
        print(
            f"| `{line}` | {used:.1f} GiB | {memory:.1f} GiB | {memory / used - 1:+.1%} "
            f"| {reached:,.0f} | {speed:,.0f} | {speed / reached - 1:+.1%} |",
            flush=True,
        )
        in_fp8 = any(override.startswith("fp8=") for override in overrides)
        same = [override for override in overrides if not override.startswith(("fp8=", "model.fp8_"))]
        if not in_fp8:
            before = overrides, reached, speed
        elif before is not None and before[0] == same:
            measured, forecast = reached / before[1], speed / before[2]
            print(
                f"| FP8 ÷ BF16 | | | | {measured:.3f} | {forecast:.3f} | {forecast / measured - 1:+.1%} |", flush=True
            )


if __name__ == "__main__":
    main()
