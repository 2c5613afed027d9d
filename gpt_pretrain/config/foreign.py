"""Options of other programs, recognized on our command line, where they belong to `gpt_pretrain.translate`."""

from collections.abc import Sequence

# Options that nearly every command line of Megatron-LM has. `translate` knows them all, from megatron-core's wheel,
# which takes five seconds to import.
_MOST_USED = """
num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups kv-channels
seq-length max-position-embeddings position-embedding-type use-rotary-position-embeddings rotary-base
rotary-percent normalization norm-epsilon swiglu disable-bias-linear add-qkv-bias
untie-embeddings-and-output-weights attention-dropout hidden-dropout init-method-std attention-backend
micro-batch-size global-batch-size train-iters train-samples lr min-lr lr-decay-style lr-decay-iters
lr-decay-samples lr-warmup-iters lr-warmup-samples lr-warmup-fraction weight-decay adam-beta1 adam-beta2 adam-eps
clip-grad bf16 fp16 fp8-format fp8-recipe fp8-param-gather fp8-amax-history-len fp8-amax-compute-algo
tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather use-megatron-fsdp
num-experts moe-router-topk moe-grouped-gemm moe-aux-loss-coeff recompute-activations recompute-granularity
data-path split mock-data vocab-size tokenizer-type tokenizer-model vocab-file merge-file
eval-iters eval-interval log-interval save-interval save load tensorboard-dir transformer-impl use-mcore-models
"""
_OF_MEGATRON_LM = frozenset(f"--{name}" for name in _MOST_USED.split())
_SECTIONS_OF_TORCHTITAN = (
    "job",
    "training",
    "parallelism",
    "lr_scheduler",
    "activation_checkpoint",
    "float8",
    "quantize",
)
# Fewer may be a slip; each of those is answered by itself.
_LEAST = 3
_SHOWN = 3


def foreign_options(options: Sequence[str]) -> str | None:
    """The message about options that are another program's; None if too few are."""
    names = [option.partition("=")[0] for option in options]
    of_megatron = [name for name in names if name in _OF_MEGATRON_LM]
    of_torchtitan = [name for name in names if name.removeprefix("--").partition(".")[0] in _SECTIONS_OF_TORCHTITAN]
    for program, format, found in (
        ("Megatron-LM", "megatron-lm", of_megatron),
        ("torchtitan", "torchtitan", [name for name in of_torchtitan if "." in name]),
    ):
        if len(found) >= _LEAST:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            return (
                f"{', '.join(found[:_SHOWN])}{more} are {program}'s options; translate them with "
                f"python -m gpt_pretrain.translate --from {format} …, which takes a file or these options"
            )
    return None
