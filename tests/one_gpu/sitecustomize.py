"""Python imports this at its start under `pytest -m gpu --share-gpu`: ranks of torchrun then share the first GPU."""

import os

if "RANK" in os.environ:
    from tests.launching import on_one_gpu

    shared = on_one_gpu(os.environ)
    os.environ.clear()
    os.environ.update(shared)
