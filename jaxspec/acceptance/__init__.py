"""How many drafts are accepted."""

from jaxspec.acceptance.prefix import accept
from jaxspec.acceptance.synthetic import draw_accepted

__all__ = ["accept", "draw_accepted"]
