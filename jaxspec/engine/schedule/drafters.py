"""The host's part in drafting: a host proposer, and the choice of how many drafts to verify."""

import warnings
from collections import deque
from collections.abc import Container, Sequence

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.schedule.record import Launched
from jaxspec.errors import one_line
from jaxspec.proposers.methods import HostProposer

MOST_FAILED = 64
"""Requests whose release is tried again. It bounds the time of a proposer that raises each time."""


class Drafters:
    """A host proposer and the choice of the width, if the engine has them.

    What they remember of a request follows from its tokens, so it need not be repaired after a
    fault: the request is released, and its tokens are committed again when they are read again.
    """

    def __init__(self, proposer: HostProposer | None, adaptive: AdaptiveWidth | None):
        self.proposer = proposer
        self.adaptive = adaptive
        self.known: set[int] = set()
        """Requests with committed tokens that were not released since."""
        self.failed: deque[int] = deque(maxlen=MOST_FAILED)
        """Requests whose release raised. It is tried again when another request is released."""

    def pay(self, plan: Plan, requests: int) -> bool:
        """Whether a step of so many requests makes drafts. It makes none if the engine chooses the
        width of such steps and last chose width 1."""
        if self.adaptive is None or not requests:
            return True
        chosen = plan.widths_of(plan.shapes.batch_for(requests))
        return not chosen or self.adaptive.current != 1

    def commit(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        """Passes on a request's new tokens, and how many of its drafts were accepted."""
        self.known.add(request)
        if self.proposer is not None:
            self.proposer.commit(request, tokens, num_drafts, accepted)
        if self.adaptive is not None:
            self.adaptive.commit(request, tokens, num_drafts, accepted)

    def release_all_but(self, running: Container[int]) -> None:
        """Releases every request that does not run any more."""
        if not (gone := [id for id in self.known if id not in running]):
            return
        for request in tuple(self.failed):
            if request in self.known or self._release(request) is None:
                self.failed.remove(request)
        for request in gone:
            if (error := self._release(request)) is not None:
                self.failed.append(request)
            self.known.discard(request)
            if error is not None:  # the request has its output; only later drafts may be affected
                warnings.warn(_complaint(request, error), RuntimeWarning, stacklevel=2)

    def _release(self, request: int) -> Exception | None:
        """Releases a request, and returns what the proposer raised."""
        if self.adaptive is not None:
            self.adaptive.release(request)
        try:
            if self.proposer is not None:
                self.proposer.release(request)
        except Exception as error:
            return error
        return None


def note_time(
    adaptive: AdaptiveWidth, launched: Sequence[Launched], asked: float, came: float
) -> None:
    """Records when the host asked for the result of the first of these steps, and got it."""
    step, *later = launched
    if not step.same_program:
        another = any(not one.same_program for one in later)
        adaptive.note_time(step.size, asked, came, another, step.prompt_tokens > 0)


def _complaint(request: int, error: Exception) -> str:
    return (
        f"the host proposer's release of request {request} raised {type(error).__name__}: "
        f"{one_line(error)}; tokens stay right, but the proposer may keep memory"
    )
