"""The manual's table of the proof's comparisons is the code's."""

from gpt_pretrain.fp8 import comparisons
from gpt_pretrain.fp8.comparisons import COMPARISONS, Comparison
from tests.launching import REPOSITORY


def test_the_manual_lists_every_comparison_with_its_bound_and_what_it_does():
    text = (REPOSITORY / "docs" / "fp8.md").read_text()
    table = text.partition("### What it compares")[2].partition("###")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines() if "|" in line]
    planned = [(each.what, each.bound, "stops" if each.stops else "warns") for each in COMPARISONS]
    assert rows[2:] == planned


def test_no_comparison_is_left_out():
    assert {each for each in vars(comparisons).values() if isinstance(each, Comparison)} == set(COMPARISONS)
