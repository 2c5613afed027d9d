"""Starts training runs as forks of itself, which with `--import` has imported everything: a life costs a second.

Reads one JSON object a line from its input and answers each with one line:

    {"start": [OVERRIDE, …], "environment": {…}, "output": FILE, "faults": [NAME or [NAME, ARGUMENT, …], …]}  → pid
    {"poll": PID}                                     → exit status as `os.waitstatus_to_exitcode` has it, or null

A fault is a function of `tests.programs.faults` that the new process calls before it trains.
"""

import json
import os
import sys
import traceback


def run(order):
    """The forked process: everything from here on is its own."""
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["environment"])
    os.setsid()
    from gpt_pretrain.__main__ import main
    from tests.programs import faults

    for name, *arguments in order["faults"]:
        getattr(faults, name)(*arguments)
    return main(order["start"])


def start(order):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = run(order)
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def poll(pid):
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def serve():
    if sys.argv[1:] == ["--import"]:
        import gpt_pretrain.training.run  # noqa: F401  # what the parent has imported, no child need

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(f"{json.dumps(start(order) if 'start' in order else poll(order['poll']))}\n")
        answers.flush()


if __name__ == "__main__":
    serve()
