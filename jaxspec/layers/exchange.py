"""The names of what can add up the products of layers over several devices. Imports no jax, because
commands read it to print their help."""

from typing import Literal

Exchange = Literal["psum", "xla", "mosaic"]
"""psum: XLA's sum; mosaic: the kernel of `exchange_norm`; xla: the reference of that kernel."""
