"""Chooses which waiting request gets a slot, by a pure function.

Requests are taken in order of arrival. If there are too few pages for one of them, later requests
that need fewer may pass it, until they have been given as many pages as it needs itself. Then all
wait for it, so that it never starves.
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
"""How many waiting requests are looked at, so that a long queue does not make steps slow."""


@dataclasses.dataclass(frozen=True)
class Seat:
    """A slot for a waiting request, and what is known of the pages that it gets."""

    request: Request
    slot: int
    positions: int
    """Number of positions that the request can write."""
    found: tuple[Entry, ...]
    """Entries of the pages that hold the beginning of its text already."""


def choose_seat(plan: Plan, ledger: Ledger) -> Seat | None:
    """A seat for the first waiting request that can have one now; None if none can."""
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
    """The waiting requests in order of arrival; if there are suspects, only the first suspect."""
    if not ledger.suspects:
        yield from ledger.waiting[:LOOKED_AT]
        return
    first = next(iter(ledger.suspects))
    yield from (request for request in ledger.waiting if request.id == first)
