"""Ranks train tiny GPTs on documents in several layouts, one after the other: FOLDER CASE…, as `run_cases` says."""

import sys
from pathlib import Path

from tests.document_training import run_cases

if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), sys.argv[2:])
