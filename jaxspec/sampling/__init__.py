"""From logits to tokens, row by row, each row with its request's own parameters."""

from jaxspec.sampling.logprobs import TopLogprobs, top_logprobs
from jaxspec.sampling.tokens import SlotSampling, greedy, sample

__all__ = ["SlotSampling", "TopLogprobs", "greedy", "sample", "top_logprobs"]
