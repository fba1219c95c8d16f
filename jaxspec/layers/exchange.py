"""The names of what can add up the products of layers over several devices. Imports no jax, because
commands read it to print their help."""

from typing import Literal

Exchange = Literal["auto", "psum", "xla", "mosaic"]
"""psum: XLA's sum; mosaic: kernels, those of `exchanging_chain` and `exchange_norm`; xla: the
reference of the latter; auto: kernels if they can run and have been tried on this kind of GPU."""
