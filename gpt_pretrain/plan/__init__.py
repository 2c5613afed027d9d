"""What a run would do, told without a GPU: where each key lands, every matrix product, memory and speed."""
