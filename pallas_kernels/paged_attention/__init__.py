from pallas_kernels.paged_attention.api import pack_queries, paged_attention

__all__ = ["pack_queries", "paged_attention"]
