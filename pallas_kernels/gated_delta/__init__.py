from pallas_kernels.gated_delta.api import (
    block_fold,
    block_folds,
    block_read,
    delta_fold,
    delta_prefill,
    delta_read,
    mixer_fold,
    mixer_read,
)

__all__ = [
    "block_fold",
    "block_folds",
    "block_read",
    "delta_fold",
    "delta_prefill",
    "delta_read",
    "mixer_fold",
    "mixer_read",
]
