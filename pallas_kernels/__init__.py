"""Paged attention and its companions for JAX on NVIDIA GPUs.

Every op is a folder with one public function, an XLA reference of the same signature (the
specification, and what other backends run) and a Mosaic GPU kernel. `implementation="auto"`
takes the kernel where it can and the reference elsewhere; naming one makes it that or an error.
"""

from pallas_kernels.add_norm import add_norm
from pallas_kernels.dense_chain import dense_chain
from pallas_kernels.paged_attention import pack_queries, paged_attention
from pallas_kernels.qkv_write import qkv_write

__all__ = ["add_norm", "dense_chain", "pack_queries", "paged_attention", "qkv_write"]
