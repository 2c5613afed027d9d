"""The GPUs that a plan can be made for: what their data sheets promise, and how much of it training gets.

The peaks are dense (half of what is quoted with sparsity). Sources:
NVIDIA H100 Tensor Core GPU data sheet (SXM5), H200 data sheet (SXM5), and HGX B200 (1,000 W): NVIDIA Blackwell
architecture brief and DGX B200 data sheet. Memory is what `nvidia-smi` shows of a whole GPU: H100 81,559 MiB, H200
143,771 MiB (the benchmarks of this repository), B200 183,359 MiB.
"""

from dataclasses import dataclass

from gpt_pretrain.config.choices import PlanGpu

# Ranks that NVLink connects: one HGX board.
GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU of the data sheets."""

    name: str
    """As CUDA names the device."""
    compute_capability: tuple[int, int]
    bf16_tflops: float
    """Dense tensor-core peak."""
    fp8_tflops: float
    """Dense tensor-core peak."""
    memory_gib: float
    bandwidth_tb_s: float
    """Of the HBM, in 10^12 bytes per second."""
    nvlink_gb_s: float
    """To all other GPUs of the node together, one direction, in 10^9 bytes per second."""
    network_gb_s: float
    """To other nodes, one direction: one 400 Gb/s adapter per GPU (DGX H100 and B200)."""

    @property
    def needs_fp8_transposes(self) -> bool:
        """Whether the tensor cores multiply FP8 in one layout only, so that a transposed copy of each operand is kept.

        Hopper does (TE 2.12, `is_non_tn_fp8_gemm_supported`); block scales need two copies everywhere.
        """
        return self.compute_capability < (10, 0)


# Dense BF16 tensor-core peaks in TFLOP/s. The first name that the device's own name contains counts, so longer names
# come first.
_BF16_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "H20": 148.0,
    "H800": 989.4,
    "GB200": 2500.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def bf16_peak_tflops(device_name: str) -> float | None:
    """Dense BF16 peak of a GPU in TFLOP/s; None for one that no data sheet here is of, and for "CPU"."""
    return next((peak for name, peak in _BF16_TFLOPS.items() if name in device_name), None)


GPUS = {
    PlanGpu.h100: Gpu(
        name="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        bf16_tflops=_BF16_TFLOPS["H100"],
        fp8_tflops=1978.9,
        memory_gib=81_559 / 1024,
        bandwidth_tb_s=3.35,
        nvlink_gb_s=450.0,
        network_gb_s=50.0,
    ),
    PlanGpu.h200: Gpu(
        name="NVIDIA H200",
        compute_capability=(9, 0),
        bf16_tflops=_BF16_TFLOPS["H200"],
        fp8_tflops=1978.9,
        memory_gib=143_771 / 1024,
        bandwidth_tb_s=4.8,
        nvlink_gb_s=450.0,
        network_gb_s=50.0,
    ),
    PlanGpu.b200: Gpu(
        name="NVIDIA B200",
        compute_capability=(10, 0),
        bf16_tflops=_BF16_TFLOPS["B200"],
        fp8_tflops=4500.0,
        memory_gib=183_359 / 1024,
        bandwidth_tb_s=8.0,
        nvlink_gb_s=900.0,
        network_gb_s=50.0,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of the peaks that training reaches, and costs that no peak describes; FP8's are `spec.recipes`'.

    Calibrated on an H200 (`tests/test_plan_speed.py` names the runs). Taken over for an H100, where 8 layers of Llama 3
    8B kept to them within 1.2%, and for a B200, where nothing has been measured.
    """

    bf16: float
    """Of the BF16 peak, by a large GEMM under the power limit of a training step."""
    depth: int
    """A GEMM of inner dimension k runs at k / (k + depth) of that: its start and end do not overlap with products."""
    attention: float
    """Of the BF16 peak, by fused causal attention, forward and backward together."""
    fp8_attention: float
    """Speed of attention in FP8 over BF16. Assumed: only the forward gains on Hopper."""
    flash_attention: float
    """Speed of FlashAttention-4's attention over cuDNN's, forward and backward together: of heads of 128 and sequences
    of 8,192; of others 1.08 to 1.13 (benchmarks/flash_attention_h200.md)."""
    bandwidth: float
    """Of the memory's bandwidth, by elementwise kernels."""
    links: float
    """Of NVLink's or the network's bandwidth, by NCCL's collectives."""
    kernel_s: float
    """From the end of a kernel to the start of the next."""
    host_s_per_step: float
    """What the host needs to launch a step beside its layers."""
    host_s_per_layer: float
    """What it needs to launch one layer, forward and backward, and its share of embedding and loss."""
    host_s_per_fp8_layer: float
    """The same with FP8's casts and scales."""
    host_s_per_graphed_layer: float
    """The same where layers are CUDA graphs."""
    count_wait_s_per_layer: float
    """How long the GPU idles in one layer with experts, forward and backward, since the host waits for the counts of
    their tokens in the middle of its forward pass, and cannot run ahead."""
    host_s_per_expert_product: float
    """What the host needs to launch one product of one expert, where experts are multiplied one by one."""
    host_s_per_fp8_expert_product: float
    """The same with FP8's casts and scales."""
    host_s_per_tp_layer: float
    """What collectives of tensor parallelism add to launching one layer: in FP8, taken over for BF16."""
    host_s_per_cp_layer: float
    """What attention in parts, and their exchange, add with context parallelism: in FP8, too much in BF16."""
    host_forward: float
    """Share of a layer's launches that a second forward pass repeats."""


EFFICIENCY = Efficiency(
    bf16=0.70,
    depth=50,
    attention=0.45,
    fp8_attention=1.2,
    flash_attention=1.10,
    bandwidth=0.75,
    links=0.75,
    kernel_s=3e-6,
    # GPT-2 124M: 48 layers a step took the host 224 ms in BF16, 332 in tensorwise and 128 with graphs, where it was the
    # slower one, and 12 layers 75 and 107 ms (benchmarks/gpt2_124m_1xh200.md).
    host_s_per_step=27e-3,
    host_s_per_layer=4.1e-3,
    host_s_per_fp8_layer=6.4e-3,
    host_s_per_graphed_layer=2.1e-3,
    # Two layers of Mixtral (BF16 and tensorwise, on an H200 and an H100) and four of Qwen3-30B-A3B with one kernel for
    # all experts (an H100), on one GPU, and both on two H100s (EP 2 and DP 2), ask for 2 to 7 ms
    # (benchmarks/experts.md).
    count_wait_s_per_layer=4e-3,
    # Four layers of Qwen3-30B-A3B, four microbatches of 2 × 4,096 tokens a step, on one H200: 983 ms a step in BF16 and
    # 1,179 in tensorwise scaling, of which kernels ran for 368 and 462. LM head, loss and optimizer are taken off, and
    # a dense layer's time; 768 products of each layer share the rest.
    host_s_per_expert_product=64e-6,
    host_s_per_fp8_expert_product=77e-6,
    # Four layers of Llama 3 8B in FP8 where the host was the slower one: 32 layers a step took 346 ms with TP 4 + SP,
    # 470 with CP 2, 489 with CP 4 and 590 with TP 2 + SP × CP 2, and 256 layers 2.63 s with TP 2 + SP
    # (benchmarks/layouts_4xh200.md).
    host_s_per_tp_layer=3.5e-3,
    host_s_per_cp_layer=7.4e-3,
    # 48 layers of 15.4B, recomputed in microbatches of 2,048 tokens, took 0.82 s a step of two of them on one machine
    # and 1.78 of four on another: 1.29 and 1.42 times as long as by the above (benchmarks/gpt_12_8b_15_4b_1xh200.md).
    host_forward=1 / 3,
)
