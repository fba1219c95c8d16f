"""How much of a proposal is kept."""

from jaxspec.acceptance.prefix import accept
from jaxspec.acceptance.synthetic import SyntheticAcceptance, draw_accepted

__all__ = ["SyntheticAcceptance", "accept", "draw_accepted"]
