"""How much of a proposal is kept."""

from jaxspec.acceptance.prefix import accept

__all__ = ["accept"]
