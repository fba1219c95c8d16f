"""How many drafts are made in a step that verifies only some of them."""

PER_VERIFIED = 1.5
"""Tokens that a request drafts for each one that the step verifies on average. Some requests get
more than the average, because their drafts are likelier, but hardly ever twice as many."""
MULTIPLE = 4
"""Drafted widths are multiples of it, so that a step has few odd shapes."""


def drafted_width(verified: int, whole: int) -> int:
    """Tokens per request, the newest one among them, that a step drafts if it verifies `verified`
    per request on average; `whole` is the drafter's block."""
    wanted = -(-PER_VERIFIED * verified // MULTIPLE) * MULTIPLE
    return min(int(wanted), whole)
