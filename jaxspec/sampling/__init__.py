"""From logits to tokens, with the sampling parameters of each request."""

from jaxspec.sampling.logprobs import (
    PIECE,
    TopLogprobs,
    probabilities,
    top_logprobs,
    top_logprobs_in_pieces,
)
from jaxspec.sampling.parameters import SlotSampling
from jaxspec.sampling.rejection import draw_drafts, rejection_sample
from jaxspec.sampling.tokens import sample

__all__ = [
    "PIECE",
    "SlotSampling",
    "TopLogprobs",
    "draw_drafts",
    "probabilities",
    "rejection_sample",
    "sample",
    "top_logprobs",
    "top_logprobs_in_pieces",
]
