from pallas_kernels.gated_delta.api import (
    delta_fold,
    delta_prefill,
    delta_read,
    mixer_fold,
    mixer_read,
)

__all__ = ["delta_fold", "delta_prefill", "delta_read", "mixer_fold", "mixer_read"]
