"""A rank whose store nobody opens: SIGNAL comes while torch waits for it. Exit code 99: it was not heard."""

import os
import signal
import sys
from threading import Timer

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.launch.signals import ended_by_signals
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.emulated_training import TINY

if __name__ == "__main__":
    install_cpu_device()
    config = load_config(TINY)
    two = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    launch = read_launch({**two, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    # A shell may have had Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Timer(0.5, os.kill, (os.getpid(), signal.Signals[sys.argv[1]])).start()
    Timer(5.0, os._exit, (99,)).start()
    with ended_by_signals(), process_groups(config.model, launch, detect_platform()):
        pass
