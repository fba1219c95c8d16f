"""Chooses which waiting request is given a slot: a pure choice.

Requests come in their order. One that finds too few pages may be passed by later ones for which
there are enough, until these have been given as many pages as it needs itself. Then all wait for
it, so that it starves at no load.
"""

import dataclasses
from collections.abc import Iterator

from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule.ledger import found_for
from jaxspec.engine.schedule.page_index import Entry
from jaxspec.engine.schedule.pages import can_admit
from jaxspec.engine.schedule.record import Ledger

LOOKED_AT = 16
"""How many waiting requests are looked at, so that a step of a long queue is not slow."""


@dataclasses.dataclass(frozen=True)
class Seat:
    """A place for a waiting request."""

    request: Request
    slot: int
    positions: int
    """Positions that it can write."""
    found: tuple[Entry, ...]
    """The pages with the beginning of its text."""


def choose_seat(plan: Plan, ledger: Ledger) -> Seat | None:
    """A place for the first waiting request that can have one now."""
    used = {request.slot for request in ledger.running.values()}
    slot = next((slot for slot in range(plan.num_slots) if slot not in used), None)
    if slot is None:
        return None
    for request in _may_come(ledger):
        positions, found = plan.positions_of(request.length_limit), found_for(ledger, request)
        if can_admit(ledger.book, positions, found):
            return Seat(request, slot, positions, found)
        if request.passed_pages >= ledger.book.pages_for(positions):
            return None
    return None


def _may_come(ledger: Ledger) -> Iterator[Request]:
    """The waiting requests in their order; while there are suspects, only the first of these."""
    if not ledger.suspects:
        yield from ledger.waiting[:LOOKED_AT]
        return
    first = next(iter(ledger.suspects))
    yield from (request for request in ledger.waiting if request.id == first)
