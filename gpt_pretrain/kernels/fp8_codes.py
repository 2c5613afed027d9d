"""How many FP8 codes are zero, how many are the largest, and which is: what the statistics ask of each tensor.

Together one pass over the codes on a GPU (`counting_cuda.py`). torch's own operations make ten of them, one byte at a
time, which took as long as the step that was watched.
"""

import torch


def count_codes(codes: torch.Tensor, largest: int) -> torch.Tensor:
    """Counts codes without regard to their sign; does not wait for the device.

    Args:
        codes: float8_e4m3fn or float8_e5m2, any shape, contiguous.
        largest: The code of the format's largest finite magnitude.

    Returns:
        int64 [3]: how many are zero, how many are `largest`, and the code of the largest magnitude that there is, which
        is beyond `largest` for NaN and infinity.
    """
    magnitudes_and_signs = codes.detach().view(torch.uint8)
    if codes.is_cuda:
        from gpt_pretrain.kernels.fp8_codes_triton import count_bytes

        return count_bytes(magnitudes_and_signs, largest)
    magnitudes = magnitudes_and_signs & 0x7F
    zero, full = (magnitudes == 0).sum(), (magnitudes == largest).sum()
    return torch.stack([zero, full, magnitudes.max().long()])
