from pallas_kernels.silu_gate.api import silu_gate

__all__ = ["silu_gate"]
