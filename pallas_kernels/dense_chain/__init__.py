from pallas_kernels.dense_chain.api import dense_chain, dense_chain_runs
from pallas_kernels.dense_chain.chain import Chain, ChainWeights, begin_chain
from pallas_kernels.dense_chain.shape import Arrivals, ChainShape, first_arrivals

__all__ = [
    "Arrivals",
    "Chain",
    "ChainShape",
    "ChainWeights",
    "begin_chain",
    "dense_chain",
    "dense_chain_runs",
    "first_arrivals",
]
