"""What FP8 statistics cost: the same run without them and with them at every step, in turns.

    python benchmarks/fp8_statistics_cost.py --steps 60 --rounds 2 model=gpt2_124m data=mock fp8=delayed

The difference of the two step times is what one observation costs; at `logging.fp8_statistics_interval=100` a
hundredth of it falls on each step. Printed are medians over the intervals after the first, which warms up.
On a machine without FP8 add `model.fp8_emulate=true`. `--nproc N` starts torchrun with N processes.
"""

import argparse
import statistics

from loop_overhead import run_application

INTERVAL = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=10, help="steps between two measured times")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.steps < 2 * arguments.interval:
        parser.error("--steps must hold at least two intervals: the first warms up and is left out")
    times: dict[str, list[float]] = {"null": [], "1": []}
    memory: dict[str, float | None] = {}
    for _ in range(arguments.rounds):
        for every, measured in times.items():
            overrides = [*arguments.overrides, f"logging.fp8_statistics_interval={every}"]
            result = run_application(arguments.nproc, arguments.steps, arguments.interval, overrides)
            measured.extend(result["step_time_s"][1:])
            memory[every] = result["memory_gib"]
    print(f"# {' '.join(arguments.overrides)} on {arguments.nproc} process(es), {len(times['null'])} intervals")
    print("| fp8_statistics_interval | step (median) | spread | peak memory |")
    print("|---|---|---|---|")
    for every, measured in times.items():
        print(
            f"| {every} | {statistics.median(measured) * 1e3:.1f} ms "
            f"| {min(measured) * 1e3:.1f}–{max(measured) * 1e3:.1f} ms | {memory[every]:.1f} GiB |"
        )
    plain, observed = (statistics.median(measured) for measured in times.values())
    cost = observed / plain - 1
    print(f"an observation costs {cost:.1%} of a step; at an interval of {INTERVAL}: {cost / INTERVAL:.3%}")


if __name__ == "__main__":
    main()
