from pallas_kernels.qkv_write.api import qkv_write

__all__ = ["qkv_write"]
