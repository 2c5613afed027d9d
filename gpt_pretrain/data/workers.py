"""What data-loading processes import before they are forked: see `batches`.

megatron-core warns at import of optional packages that only a training process would use; here they tell nobody
anything.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gpt_pretrain.data.datasets  # noqa: F401  # imported for the processes to come
