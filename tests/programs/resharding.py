"""Ranks save tiny runs in several layouts, and go on from what others saved: FOLDER CASE…, as `run_cases` says."""

import sys
from pathlib import Path

from tests.resharded_training import run_cases

if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), sys.argv[2:])
