"""The proof's comparisons; tests/test_docs.py finds them on the manual's site."""

from gpt_pretrain.fp8 import comparisons
from gpt_pretrain.fp8.comparisons import COMPARISONS, Comparison


def test_no_comparison_is_left_out():
    assert {each for each in vars(comparisons).values() if isinstance(each, Comparison)} == set(COMPARISONS)
