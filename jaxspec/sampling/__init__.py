"""From logits to tokens, with the sampling parameters of each request."""

from jaxspec.sampling.logprobs import TopLogprobs, top_logprobs
from jaxspec.sampling.rejection import draw_drafts, rejection_sample
from jaxspec.sampling.tokens import SlotSampling, greedy, sample

__all__ = [
    "SlotSampling",
    "TopLogprobs",
    "draw_drafts",
    "greedy",
    "rejection_sample",
    "sample",
    "top_logprobs",
]
