from pallas_kernels.dense_chain.api import dense_chain, dense_chain_runs
from pallas_kernels.dense_chain.shape import ChainShape, Meetings, first_meetings

__all__ = ["ChainShape", "Meetings", "dense_chain", "dense_chain_runs", "first_meetings"]
