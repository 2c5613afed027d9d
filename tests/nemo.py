"""NeMo 1.x command lines, as they are written in launch scripts."""

NEMO_FP8 = (
    "++model.fp8=True",
    "++model.fp8_hybrid=True",
    "++model.fp8_e4m3=False",
    "++model.fp8_margin=0",
    "++model.fp8_amax_history_len=1024",
    '++model.fp8_amax_compute_algo="max"',
    "++model.fp8_params=True",
)
NEMO_FP8_WITH_TE = (*NEMO_FP8, "++model.transformer_engine=True")
