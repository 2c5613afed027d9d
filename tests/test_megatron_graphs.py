"""CUDA graphs where there is no GPU: what a recording leaves behind that came to nothing."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import cuda_graphs

from gpt_pretrain.megatron import whole_layers


def test_a_recording_that_fails_does_not_pass_for_one_that_goes_on(monkeypatch):
    streams = []
    tracker = SimpleNamespace(get_states=dict)

    def run_out():
        cuda_graphs._set_capture_start()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_record", [object()])
    monkeypatch.setattr(cuda_graphs, "create_cudagraphs", run_out)
    monkeypatch.setattr(whole_layers.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    with pytest.raises(torch.OutOfMemoryError):
        whole_layers._create_graphs()
    assert not cuda_graphs.is_graph_capturing()
    assert streams == ["default"]


def test_each_use_of_the_graphs_pool_is_given_back_at_the_end(monkeypatch):
    released = []
    monkeypatch.setattr(whole_layers, "_allocate", torch.zeros)
    monkeypatch.setattr(cuda_graphs.CudaGraphManager, "global_mempool", (0, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *pool: released.append(pool))
    assert [whole_layers._allocate_in_pool(size).numel() for size in (2, 5)] == [2, 5]
    whole_layers.release_graphs([])
    whole_layers.release_graphs([])
    assert released == [(3, (0, 7))] * 2
