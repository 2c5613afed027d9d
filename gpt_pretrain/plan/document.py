"""`plan.json`: the plan as data, for scripts and for comparing runs with what was planned.

Times are in seconds, memory in bytes, speeds in tokens per second and GPU. `version` grows when a name changes its
meaning or goes away; new names may come.
"""

import json
from enum import Enum
from pathlib import Path
from typing import Any

from gpt_pretrain.config.derived import FLOPS_FORMULA
from gpt_pretrain.plan.forecast import Plan
from gpt_pretrain.plan.memory import GIB
from gpt_pretrain.plan.products import Product
from gpt_pretrain.plan.speed import Speed
from gpt_pretrain.spec.kernels import Kernels

VERSION = 1
FILE_NAME = "plan.json"


def _product(product: Product) -> dict[str, Any]:
    return {name: getattr(product, name) for name in Product.__dataclass_fields__}


def _kernels(kernels: Kernels) -> dict[str, Any]:
    values = {name: getattr(kernels, name) for name in Kernels.__dataclass_fields__}
    named = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
    return {
        **named,
        "cross_entropy_loss_fusion": kernels.cross_entropy_loss_fusion is not None,
        "cross_entropy_fusion_impl": named["cross_entropy_loss_fusion"],
    }


def _speed(speed: Speed) -> dict[str, Any]:
    return {
        "step_s": speed.step_s,
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
        "seconds": dict(speed.seconds),
    }


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    memory, model, layout = plan.memory, plan.spec.model, plan.spec.layout
    speed = None
    if plan.speed is not None:
        speed = {
            **_speed(plan.speed.run),
            "tflops_per_gpu": plan.speed.run.tokens_per_s_per_gpu * plan.flops_per_token / 1e12,
            "bf16": _speed(plan.speed.bf16),
            "fp8": None if plan.speed.fp8 is None else _speed(plan.speed.fp8),
            "fp8_recipe": plan.speed.fp8_recipe,
            "fp8_over_bf16": plan.speed.ratio,
        }
    return {
        "version": VERSION,
        "name": plan.spec.config.name,
        "gpu": {
            "name": plan.gpu.name,
            "memory_gib": plan.gpu.memory_gib,
            "bf16_tflops": plan.gpu.bf16_tflops,
            "fp8_tflops": plan.gpu.fp8_tflops,
            "bandwidth_tb_s": plan.gpu.bandwidth_tb_s,
            "nvlink_gb_s": plan.gpu.nvlink_gb_s,
        },
        "layout": {
            "num_gpus": layout.world_size,
            "tensor_parallel": layout.tp,
            "pipeline_parallel": layout.pp,
            "virtual_pipeline": layout.vp,
            "context_parallel": layout.cp,
            "data_parallel": layout.dp,
            "num_microbatches": layout.num_microbatches,
            "micro_batch_size": model.micro_batch_size,
            "global_batch_size": model.global_batch_size,
            "sequence_length": model.encoder_seq_length,
        },
        "num_parameters": plan.num_parameters,
        "kernels": _kernels(plan.spec.kernels),
        "settings": [
            {
                "key": setting.key,
                "requested": setting.requested,
                "effective": dict(setting.effective),
                "inert": setting.inert,
                "note": setting.note,
            }
            for setting in plan.settings
        ],
        "products": [_product(product) for product in plan.products],
        "fp8_flops_share": plan.spec.fp8_flops_share,
        "memory": {
            "fits": memory.fits,
            "needed_gib": memory.needed_gib,
            "peak_gib": memory.worst.peak / GIB,
            "outside_gib": memory.outside_gib,
            "worst_stage": memory.worst.stage,
            "stages": [
                {"stage": stage.stage, "peak": stage.peak, "items": dict(stage.items)} for stage in memory.stages
            ],
            "peak_by_recomputation": dict(memory.recompute_peaks),
        },
        "checkpoint": {
            "saves": plan.checkpoint.saves,
            "num_bytes": plan.checkpoint.num_bytes,
            "bytes_per_gpu": plan.checkpoint.bytes_per_gpu,
            "stall_s": plan.checkpoint.stall_s,
            "write_s": plan.checkpoint.write_s,
            "time_share": plan.checkpoint.time_share,
        },
        "flops_per_token": plan.flops_per_token,
        "flops_formula": FLOPS_FORMULA,
        "speed": speed,
        "sentences": list(plan.sentences),
    }


def write_plan(plan: Plan, run_dir: Path) -> Path:
    """Writes `plan.json`, the only file that a plan leaves, and returns its path."""
    path = run_dir / FILE_NAME
    path.write_text(json.dumps(plan_document(plan), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
