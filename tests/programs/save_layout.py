"""Ranks save a model with the weights that its seed gives.

    FOLDER TOKENIZER OVERRIDE…

FOLDER becomes the run's directory. TOKENIZER is "tokenizer" for a run with one, or "none".
"""

import sys
from pathlib import Path

from tests.saved_models import save_model, small_tokenizer

if __name__ == "__main__":
    tokenizer = small_tokenizer() if sys.argv[2] == "tokenizer" else None
    save_model(Path(sys.argv[1]), *sys.argv[3:], tokenizer=tokenizer)
