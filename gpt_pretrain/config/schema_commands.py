"""The keys that only commands beside training read: `plan`, `benchmark`, `compare` and `coordinate_check`."""

from dataclasses import dataclass

from gpt_pretrain.config.choices import PlanGpu
from gpt_pretrain.config.facts import key, read_with


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """`plan`: the machine that `python -m gpt_pretrain.plan` plans for; training does not read it."""

    gpu: PlanGpu
    """GPU to forecast memory and speed for: h100 (SXM), h200 or b200."""
    num_gpus: int | None = key(largest=2**20)
    """Number of GPUs; null: trainer.devices × trainer.num_nodes if given, else the fewest that the layout needs."""
    document_length: float | None = key(
        above=0, before=None, unread=[read_with("model.data.inter_document_masking", True)]
    )
    """Tokens of the document that a token is in on average, as prepare_data tells it; null: every sample is one."""


@dataclass(kw_only=True, slots=True)
class BenchmarkConfig:
    """`benchmark`: what `python -m gpt_pretrain.benchmark` measures; training does not read it."""

    variants: list[str] = key(before=[])
    """Variants to compare; ratios refer to the first. Each is a name of `benchmark.overrides` or overrides themselves
    ("fp8=delayed model.fp8_params=true"). bare is megatron-core's own loop without overrides, bare:… that loop with
    either."""
    overrides: dict[str, str] = key(before={})
    """Overrides that each variant, by its name, adds to the command line; +benchmark.overrides.NAME='…' adds one."""
    warmup_steps: int = key(minimum=1, largest=2**31 - 1, before=10)
    """Untimed steps at the start of each process."""
    steps: int = key(minimum=1, largest=2**31 - 1, before=40)
    """Timed steps of each process, a multiple of `benchmark.interval`."""
    interval: int = key(minimum=1, before=10)
    """Steps between readings of the clock, each of which waits for the GPU and gives one mean step time."""
    rounds: int = key(minimum=1, largest=2**10, before=1)
    """How often all variants run; every second round is in reverse order to cancel drift of the machine."""
    profile: bool = key(before=False)
    """Record three more steps of each variant's first process: a Perfetto trace and a breakdown of their time."""


@dataclass(kw_only=True, slots=True)
class GateConfig:
    """What `python -m gpt_pretrain.compare` demands of every variant; exit code 4 if a demand is missed or unknown."""

    max_loss_gap: str | None = key(before=None)
    """Largest final loss above the first variant's, as a percentage: 0.5%. The whole confidence interval must lie
    below it. The verdict calls such a gap as good. null: no demand, and 0.5% for the verdict."""
    min_speedup: float | None = key(before=None)
    """Smallest speedup: the first variant's GPU-seconds to the same loss over each other variant's. The whole
    confidence interval must lie above. null: no demand."""


@dataclass(kw_only=True, slots=True)
class CompareConfig(GateConfig):
    """`compare`: what `python -m gpt_pretrain.compare` trains and demands; training does not read it."""

    variants: list[str] = key(before=[])
    """Variants to compare, the baseline first. Each is a name of `benchmark.overrides` or overrides themselves
    ("fp8=delayed model.fp8_params=true")."""
    seeds: int = key(minimum=1, before=1)
    """Runs of each variant, with model.seed and the numbers after it. One shows no noise."""


@dataclass(kw_only=True, slots=True)
class CoordinateCheckConfig:
    """`coordinate_check`: what `python -m gpt_pretrain.coordinate_check` trains; training does not read it."""

    widths: list[int] = key(before=[])
    """Values of model.hidden_size to train at."""
    steps: int = key(minimum=5, largest=2**20, before=10)
    """Steps at the peak rate. Logits depend on the width before they have learned anything."""
