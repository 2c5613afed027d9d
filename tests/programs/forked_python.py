"""Stands in for Python's interpreter: has a process forked that has imported everything, and waits for it.

The socket of `tests.forked_runs.forked_python` takes the order and answers with the process's number, and later with
its exit code. SIGTERM is passed on.
"""

import json
import os
import signal
import socket
import sys

server = socket.socket(socket.AF_UNIX)
server.connect(os.environ["FORKED_PYTHON"])
order = {
    # torchrun starts its ranks with -u.
    "start": [argument for argument in sys.argv[1:] if argument != "-u"],
    "environment": dict(os.environ),
    "stdout": f"/proc/{os.getpid()}/fd/1",
    "stderr": f"/proc/{os.getpid()}/fd/2",
    "faults": [],
}
answers = server.makefile("rw")
answers.write(json.dumps(order) + "\n")
answers.flush()
process = int(answers.readline())
signal.signal(signal.SIGTERM, lambda number, frame: os.kill(process, number))
# As a terminal's Ctrl-C reaches the process itself.
signal.signal(signal.SIGINT, signal.SIG_IGN)
code = int(answers.readline())
sys.exit(code if code >= 0 else 128 - code)
