"""What the application's loop costs over the bare megatron-core loop: both under the same knobs, in turns.

    python benchmarks/loop_overhead.py --steps 60 --rounds 2 model=gpt2_124m data=mock

Each round runs the application, then `bare_loop.py`, each in a process of its own; so a drift of the machine's clocks
falls on both. Printed is the median of the intervals' step times after the first interval, which warms up.
`--nproc N` starts both with torchrun on N processes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def launch(nproc: int, arguments: list[str]) -> str:
    prefix = [sys.executable]
    if nproc > 1:
        prefix += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    done = subprocess.run([*prefix, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    return done.stdout


def run_application(nproc: int, steps: int, interval: int, overrides: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as run_dir:
        launch(
            nproc,
            [
                "-m",
                "gpt_pretrain",
                *overrides,
                f"run_dir={run_dir}/run",
                f"trainer.max_steps={steps}",
                f"trainer.log_every_n_steps={interval}",
                "trainer.limit_val_batches=0",
                "checkpoint.save_at_end=false",
                "sample.max_new_tokens=0",
            ],
        )
        lines = (Path(run_dir) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return {
        "step_time_s": [record["step_time_s"] for record in records],
        "memory_gib": records[-1]["memory_gib"],
        "tokens_per_step": round(records[-1]["tokens_per_s"] * records[-1]["step_time_s"]),
        "flops_per_token": records[-1]["tflops_per_gpu"] * 1e12 / records[-1]["tokens_per_s_per_gpu"],
    }


def run_bare_loop(nproc: int, steps: int, interval: int, overrides: list[str]) -> dict[str, object]:
    output = launch(nproc, ["benchmarks/bare_loop.py", "--steps", str(steps), "--interval", str(interval), *overrides])
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.steps < 2 * arguments.interval:
        parser.error("--steps must hold at least two intervals: the first warms up and is left out")
    knobs = (arguments.nproc, arguments.steps, arguments.interval, arguments.overrides)
    times: dict[str, list[float]] = {"application": [], "bare loop": []}
    memory: dict[str, float | None] = {}
    for _ in range(arguments.rounds):
        application = run_application(*knobs)
        bare = run_bare_loop(*knobs)
        for name, result in (("application", application), ("bare loop", bare)):
            times[name] += result["step_time_s"][1:]
            memory[name] = result["memory_gib"]
    tokens, flops = application["tokens_per_step"] / arguments.nproc, application["flops_per_token"]
    print(f"# {' '.join(arguments.overrides)} on {arguments.nproc} process(es), {len(times['application'])} intervals")
    print("| loop | step (median) | spread | tokens/s/GPU | TFLOP/s (causal) | peak memory |")
    print("|---|---|---|---|---|---|")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rate = tokens / median
        used = "–" if memory[name] is None else f"{memory[name]:.1f} GiB"
        print(
            f"| {name} | {median * 1e3:.1f} ms | {min(seconds) * 1e3:.1f}–{max(seconds) * 1e3:.1f} ms "
            f"| {rate:,.0f} | {rate * flops / 1e12:.1f} | {used} |"
        )
    ratio = statistics.median(times["bare loop"]) / statistics.median(times["application"])
    print(f"application ÷ bare loop (speed): {ratio:.4f}")


if __name__ == "__main__":
    main()
