"""A program on what takes itself for a host of its own: NAME FAULTS -m MODULE … or NAME FAULTS FILE ….

Ranks of two "hosts" on one machine see each other's processes no more than on two machines. FAULTS is JSON: names and
arguments of functions in `tests.programs.faults`.
"""

import json
import runpy
import socket
import sys

if __name__ == "__main__":
    _, host, faults, *program = sys.argv
    socket.gethostname = lambda: host
    if found := json.loads(faults):
        from tests.programs import faults as known

        for name, *arguments in found:
            getattr(known, name)(*arguments)
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")
