from pallas_kernels.gated_product.api import gated_product, runs_in_one_kernel

__all__ = ["gated_product", "runs_in_one_kernel"]
