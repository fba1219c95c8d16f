"""Paged attention and the other GPU work of a transformer's layers, for JAX on NVIDIA GPUs.

Each op is a public function with two implementations of the same signature: an XLA reference, which
is the specification and runs on every backend, and a Mosaic GPU kernel. `implementation="auto"`
runs the kernel if the device is a Hopper GPU and the kernel can do the call, and the reference
otherwise. An implementation that is named either runs or raises `NotForThisKernel`, which says why.
`docs/kernels.md` has a table of the ops. (`split_product` has no kernel: XLA computes its parts,
and the kernel that reads them adds them up.)
"""

from pallas_kernels.add_norm import add_norm
from pallas_kernels.dense_chain import dense_chain
from pallas_kernels.fp8_product import fp8_product
from pallas_kernels.gated_delta import (
    block_fold,
    block_folds,
    block_read,
    delta_fold,
    delta_prefill,
    delta_read,
    mixer_fold,
    mixer_read,
)
from pallas_kernels.gated_product import gated_product
from pallas_kernels.paged_attention import pack_queries, paged_attention
from pallas_kernels.qkv_write import qkv_write
from pallas_kernels.refusal import NotForThisKernel
from pallas_kernels.silu_gate import silu_gate
from pallas_kernels.split_product import split_product

__all__ = [
    "NotForThisKernel",
    "add_norm",
    "block_fold",
    "block_folds",
    "block_read",
    "delta_fold",
    "delta_prefill",
    "delta_read",
    "dense_chain",
    "fp8_product",
    "gated_product",
    "mixer_fold",
    "mixer_read",
    "pack_queries",
    "paged_attention",
    "qkv_write",
    "silu_gate",
    "split_product",
]
