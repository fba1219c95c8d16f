"""The two forms of a step that verifies only some of the drafts."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Even:
    """A width that gives every request the same number of tokens. Such a step drafts no more than
    it verifies. A width that is a plain number is shared out instead: requests whose drafts are
    likelier get more of it (`acceptance/shares.py`), for which each request drafts some more."""

    each: int

    def __str__(self) -> str:
        return f"{self.each} even"


Width = int | Even


def tokens_each(width: Width) -> int:
    """Tokens that a step of this width verifies per request, on average."""
    return width.each if isinstance(width, Even) else width
