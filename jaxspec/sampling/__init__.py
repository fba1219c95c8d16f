"""From logits to tokens, row by row, each row with its request's own parameters."""

from jaxspec.sampling.logprobs import TopLogprobs, top_logprobs
from jaxspec.sampling.rejection import draw_drafts, sample_beside_drafts
from jaxspec.sampling.tokens import SlotSampling, greedy, sample

__all__ = [
    "SlotSampling",
    "TopLogprobs",
    "draw_drafts",
    "greedy",
    "sample",
    "sample_beside_drafts",
    "top_logprobs",
]
