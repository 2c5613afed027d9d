"""CUDA graphs where there is no GPU: what a recording leaves behind that came to nothing."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import cuda_graphs

from gpt_pretrain.megatron import graphs


def test_a_recording_that_fails_does_not_pass_for_one_that_goes_on(monkeypatch):
    streams = []
    tracker = SimpleNamespace(get_states=dict)

    def run_out():
        cuda_graphs._set_capture_start()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_record", [object()])
    monkeypatch.setattr(cuda_graphs, "create_cudagraphs", run_out)
    monkeypatch.setattr(graphs.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    with pytest.raises(torch.OutOfMemoryError):
        graphs._create_graphs()
    assert not cuda_graphs.is_graph_capturing()
    assert streams == ["default"]
