"""Paged attention and its companions for JAX on NVIDIA GPUs.

Every op is one public function, an XLA reference of the same signature (the specification, and what
other backends run) and a Mosaic GPU kernel. `implementation="auto"` takes the kernel if it can run
here and the reference otherwise; naming one makes it that or an error.
"""

from pallas_kernels.add_norm import add_norm
from pallas_kernels.dense_chain import dense_chain
from pallas_kernels.paged_attention import pack_queries, paged_attention
from pallas_kernels.qkv_write import qkv_write
from pallas_kernels.split_product import split_product

__all__ = [
    "add_norm",
    "dense_chain",
    "pack_queries",
    "paged_attention",
    "qkv_write",
    "split_product",
]
