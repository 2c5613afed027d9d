"""Runs Python programs as forks of itself, which with `--import` has imported everything: a life costs a second.

Reads one JSON object a line from its input and answers each with one line:

    {"start": [ARGUMENT, …], "environment": {…}, "stdout": FILE, "stderr": FILE, "faults": […]}  → pid
    {"poll": PID}                            → exit status as `os.waitstatus_to_exitcode` has it, or null

The arguments are Python's own: `-m MODULE …` or `FILE …`. A fault is [NAME, ARGUMENT, …], a function of
`tests.programs.faults` that the new process calls first.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import re
import runpy
import site
import sys
import threading
import traceback
import weakref


def run(order):
    """The forked process: everything from here on is its own."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(order["environment"])
    os.setsid()
    # What a new interpreter does with the variable.
    sys.path[:0] = filter(None, order["environment"].get("PYTHONPATH", "").split(os.pathsep))
    site.execsitecustomize()
    if order["faults"]:
        from tests.programs import faults

        for name, *arguments in order["faults"]:
            getattr(faults, name)(*arguments)
    program, *arguments = order["start"]
    if program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


def exit_code(order):
    """Runs the program, and what Python does at its end before it takes itself apart."""
    try:
        run(order)
        code = 0
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    return code or 0


OPTION = re.compile(r"(data|experiment|fp8|model|optimizer|parallelism)=\w+")


@functools.cache
def merge_files(*options):
    """Once for all children: Hydra's merge of the files of these options takes a child a tenth of its time."""
    from gpt_pretrain.config.errors import ConfigError
    from gpt_pretrain.config.source import Loader, Source

    # The child says what is wrong with them.
    with contextlib.suppress(ConfigError):
        Loader(Source()).compose(options)


def start(order):
    if sys.argv[1:] == ["--import"]:
        merge_files(*filter(OPTION.fullmatch, order["start"]))
    if "model.compile=true" in order["start"]:
        # Once for all children: torch compiles and loads a program for each instruction set that the CPU has.
        importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = exit_code(order)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def poll(pid):
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def serve():
    if sys.argv[1:] == ["--import"]:
        # What the parent has done, no child need: imports, and what Hydra and its parser keep of a first composition.
        for module in ("gpt_pretrain.training.run", "gpt_pretrain.commands.command_line", "hydra.main"):
            importlib.import_module(module)
        for module in ("tests.programs.faults", "tests.emulated_training", "tests.sabotages"):
            importlib.import_module(module)
        jobs, runs = importlib.import_module("gpt_pretrain.rules.jobs"), importlib.import_module("tests.runs")
        for overrides in ((), runs.SMALL_RUN):
            jobs.load_config(overrides)
        # A child's collector would touch, and so copy, every page of what it will never free.
        gc.collect()
        gc.freeze()
        # Nor need it take torch's operators apart at its end, which touches seven thousand pages.
        for finalizer in weakref.finalize._registry:
            finalizer.atexit = False

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(f"{json.dumps(start(order) if 'start' in order else poll(order['poll']))}\n")
        answers.flush()


if __name__ == "__main__":
    serve()
