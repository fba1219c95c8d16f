from pallas_kernels.read_ahead.mosaic import read_ahead

__all__ = ["read_ahead"]
