"""What a configuration would do, told without a GPU: where each key lands, every GEMM, memory, speed and the verdict."""
