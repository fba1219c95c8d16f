"""What differs between releases of jax. It is known here without importing Mosaic GPU."""

import jax

MOVES_REGISTERS = jax.__version_info__ < (0, 12)
"""Whether `plgpu.set_max_registers` does anything. jax 0.12 compiles kernels so that they could be
linked with others, and the assembler then ignores it."""
