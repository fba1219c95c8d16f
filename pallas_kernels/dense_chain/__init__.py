from pallas_kernels.dense_chain.api import chain_choice, dense_chain, exchanging_chain
from pallas_kernels.dense_chain.chain import Chain, begin_chain
from pallas_kernels.dense_chain.shape import (
    MORE_ROUNDED_TOKENS,
    MORE_TOKENS,
    Arrivals,
    ChainShape,
    first_arrivals,
)
from pallas_kernels.dense_chain.weights import ChainWeights

__all__ = [
    "MORE_ROUNDED_TOKENS",
    "MORE_TOKENS",
    "Arrivals",
    "Chain",
    "ChainShape",
    "ChainWeights",
    "begin_chain",
    "chain_choice",
    "dense_chain",
    "exchanging_chain",
    "first_arrivals",
]
