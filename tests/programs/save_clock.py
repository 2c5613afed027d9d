"""Two ranks ask at each of 60 steps whether to save: FOLDER. Rank 1's own clock would say so at every step.

They also save at step 20, and rank 1 gets a signal at step 50. Rank r writes FOLDER/r.json: the steps at which a save
was due, rank r's time at each of them, and at which step it was told to end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from gpt_pretrain.training.stop import StopRequest

INTERVAL_S = 0.2
RANK = int(os.environ["RANK"])


def main() -> None:
    torch.distributed.init_process_group("gloo")
    due, ended = [], None
    began = time.monotonic()
    with StopRequest(None, INTERVAL_S if RANK == 0 else 0.0) as stop:
        for step in range(1, 61):
            time.sleep(0.02 if RANK == 0 else 0.001)
            if step == 20 or stop.save_is_due:
                if stop.save_is_due:
                    due.append((step, time.monotonic() - began))
                stop.saved()
            if RANK == 1 and step == 50:
                signal.raise_signal(signal.SIGUSR1)
            reason = stop.poll()
            if reason is not None:
                ended = (step, reason)
                break
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps({"due": due, "ended": ended}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
