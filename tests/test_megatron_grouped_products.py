"""Products of many small experts in one kernel, interpreted; on a GPU: test_gpu_experts.py."""

import pytest

from tests.forked_runs import interpret_kernels

CHECKS = {
    "uneven experts": "check_products('cpu')",
    "one expert has all": "check_products('cpu', ONE_HAS_ALL)",
    "widths of whole tiles": "check_products('cpu', out_features=256, in_features=128)",
    "sabotages": "check_sabotages_are_caught('cpu')",
    "moved weights": "check_moved_tensors_are_found('cpu')",
    "no rows": "check_no_rows('cpu')",
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_interpreted_compute_what_single_products_do(check):
    interpret_kernels(f"from tests.grouped_products import *\n{CHECKS[check]}")
