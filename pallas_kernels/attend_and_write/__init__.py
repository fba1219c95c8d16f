from pallas_kernels.attend_and_write.api import attend_and_write

__all__ = ["attend_and_write"]
