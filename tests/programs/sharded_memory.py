"""What a run with sharded weights allocates at a start, in a step, a validation, a save and a load: FOLDER.

Rank r writes FOLDER/RANKS.r.json: by case and phase, the bytes that torch's allocator has handed out since the case
began, at most and at the end of the phase; and what the model's sections take whole.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpt_pretrain.checkpoint.load import load_checkpoint, load_weights, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.checkpoint.save import CheckpointSaver
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.fp8.local_layers import fp8_layers
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron import weights
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.section_buffers import SectionBucket
from gpt_pretrain.megatron.trainable import Trainable
from tests.emulated_training import TINY, Training, emulate, lay_out_anew
from tests.platforms import spec_of
from tests.refusals import compose_quickly

_RUN = (
    "parallelism=fsdp",
    "trainer.precision=bf16",
    "checkpoint.async_save=false",
    "model.num_layers=8",
    "model.hidden_size=256",
    "model.ffn_hidden_size=768",
    "model.vocab_size=2048",
    "model.ddp_bucket_size=1",
    "model.micro_batch_size=1",
    "model.global_batch_size=4",
)
WHOLE_LAYERS, WHOLE_BUCKETS = "whole layers", "whole buckets"
_STORED = (*emulate("torchao_tensorwise"), "model.fp8_params=true")


@contextmanager
def _whole_buckets() -> Iterator[None]:
    release, SectionBucket.release = SectionBucket.release, lambda bucket: None
    try:
        yield
    finally:
        SectionBucket.release = release


@contextmanager
def _whole_layers() -> Iterator[None]:
    build = weights._build_without_matrices
    weights._build_without_matrices = lambda build, device, *args, **kwargs: build(*args, **kwargs)
    try:
        yield
    finally:
        weights._build_without_matrices = build


@contextmanager
def _nothing() -> Iterator[None]:
    yield


CASES: dict[str, tuple[tuple[str, ...], Callable[[], Any]]] = {
    "bf16": ((), _nothing),
    "stored": (_STORED, _nothing),
    # A run that does not give back what it should.
    WHOLE_LAYERS: ((), _whole_layers),
    WHOLE_BUCKETS: ((), _whole_buckets),
}


class Allocations:
    """Bytes that torch's allocator holds for tensors, counted from the first phase on."""

    def __init__(self) -> None:
        self.phases: dict[str, tuple[int, int]] = {}
        self._held = 0

    def __call__(self, phase: str, do: Callable[[], Any]) -> Any:
        # What others have left must not be given back in between.
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = do()
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        most = self._held
        for event in sorted(events, key=lambda event: event.start_ns()):
            self._held += event.nbytes()
            most = max(most, self._held)
        self.phases[phase] = most, self._held
        return result


def run_case(folder: Path, case: str) -> dict[str, Any]:
    overrides, sabotage = CASES[case]
    config, allocations = compose_quickly([*TINY, *_RUN, *overrides]), Allocations()
    lay_out_anew(config)
    directory = folder / f"{torch.distributed.get_world_size()} {case}"
    spec = spec_of(config, detect_platform())
    with sabotage():
        model = allocations("model", lambda: build_model(spec, fp8_layers(spec)))
    if sabotage is _nothing:
        optimizer = allocations("optimizer", lambda: build_optimizer(model))
        trainable = Trainable(model=model, optimizer=optimizer, scheduler=build_scheduler(config, optimizer))
        training = Training(config=config, trainable=trainable)
        allocations("step", training.step)

        def save() -> None:
            with CheckpointSaver(directory, trainable, config, {}) as saver, model.newest_parameters():
                saver.save(TrainingProgress(step=1, consumed_samples=4))

        def validate() -> None:
            with model.newest_parameters():
                training.validate()

        allocations("validation", validate)
        allocations("save", save)
        checkpoint = verify_checkpoint(directory / "step_00000001")
        for phase, load in (("load", load_checkpoint), ("weights alone", load_weights)):
            allocations(phase, partial(load, checkpoint, trainable, config, {}))
    (chunk,) = model.chunks
    values = [sum(each.numel() for group in section.groups for each in group.params) for section in chunk.sections]
    matrix = max(parameter.numel() for parameter in chunk.parameters())
    stored = sum(bucket.param_data.nbytes for group in chunk.bucket_groups for bucket in group.buckets)
    return {"phases": allocations.phases, "sections": values, "matrix": matrix, "bytes": stored}


def main() -> None:
    folder, seen = Path(sys.argv[1]), {}
    install_cpu_device()
    with process_groups(compose_quickly(TINY).model, read_launch(), detect_platform()):
        for case in CASES:
            seen[case] = run_case(folder, case)
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    (folder / f"{ranks}.{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
