"""Ranks save a model with the weights that its seed gives.

    FOLDER OVERRIDE…

FOLDER becomes the run's directory.
"""

import sys
from pathlib import Path

from tests.saved_models import save_model

if __name__ == "__main__":
    save_model(Path(sys.argv[1]), *sys.argv[2:])
