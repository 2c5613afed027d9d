"""docs/reliability.md says what a run survives: each of its rows names tests, and those tests exist."""

import ast
import re
from pathlib import Path

import pytest

from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.training.watchdog import EXIT_CODE, LEARNING_STEPS, STEP_FACTOR, STEP_FLOOR_S

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.compile(r"`(test_\w+)`")
ROWS = [line for line in DOCUMENT.splitlines() if line.startswith("| ") and not line.startswith("| what happens")]
TESTS = {
    node.name
    for file in (ROOT / "tests").glob("test_*.py")
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.FunctionDef)
}


def test_the_rows_are_all_there():
    # RELIABILITY's table has 23 rows; some are two here.
    assert len(ROWS) >= 23
    assert all(row.count(" | ") == 2 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_row_is_shown_by_tests_that_exist(row):
    named = NAMED.findall(row.rsplit(" | ", 1)[1])

    assert named, "no test is named"
    assert not set(named) - TESTS


def test_the_keys_and_numbers_that_it_names_are_those_of_the_program():
    named = set(re.findall(r"`((?:model|trainer|checkpoint)(?:\.\w+)+)`", DOCUMENT))
    (watchdog,) = re.findall(r"^## The watchdog$(.*?)^## ", DOCUMENT, flags=re.MULTILINE | re.DOTALL)

    assert {"trainer.hang_timeout", "checkpoint.fall_back"} <= named <= schema_keys().keys()
    assert STEP_FACTOR == 10
    for number in (f"code {EXIT_CODE}", f"{LEARNING_STEPS} steps", "ten times", f"{STEP_FLOOR_S:.0f} s"):
        assert number in " ".join(watchdog.split()), number
