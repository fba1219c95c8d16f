from pallas_kernels.add_norm.api import add_norm

__all__ = ["add_norm"]
