"""User buffers: what TE prints of them stays away from the run's output, and text is written without them."""

import ctypes

import torch

from gpt_pretrain.megatron.parallel import silent_output, without_user_buffers


def test_what_a_library_of_c_prints_is_lost_and_nothing_else(capfd):
    library = ctypes.CDLL(None)
    print("before")
    with silent_output():
        library.puts(b"inside, from C")
    print("after")
    library.puts(b"after, from C")
    library.fflush(None)
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "after", "after, from C", "before"]


def test_only_layers_that_overlap_do_so_again_afterwards():
    overlapping, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    overlapping.ub_overlap_rs_fprop, other.ub_overlap_rs_fprop = True, False
    with without_user_buffers([torch.nn.Sequential(overlapping, other)]):
        assert not overlapping.ub_overlap_rs_fprop
    assert (overlapping.ub_overlap_rs_fprop, other.ub_overlap_rs_fprop) == (True, False)
