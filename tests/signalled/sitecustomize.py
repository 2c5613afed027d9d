"""First on Python's path it sends the process a signal at a moment that SIGNALLED names: SIGTERM:import:torch.

The moments are `import` of a module, `open` of a file with this end of its path, and `call` of a function.
"""

import os
import signal
import sys

_NAME, _KIND, _AT = os.environ["SIGNALLED"].split(":")


def _send():
    os.environ["SIGNALLED"] = "none:none:none"
    sys.setprofile(None)
    os.kill(os.getpid(), signal.Signals[_NAME])


def _audit(event, arguments):
    matches = (event == "import" and arguments[0] == _AT) or (event == "open" and str(arguments[0]).endswith(_AT))
    if event == _KIND and matches and os.environ["SIGNALLED"].startswith(_NAME):
        _send()


def _profile(frame, event, _):
    if event == "call" and frame.f_code.co_name == _AT:
        _send()


if _KIND == "call":
    sys.setprofile(_profile)
elif _KIND != "none":
    sys.addaudithook(_audit)
