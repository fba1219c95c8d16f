"""Chooses what one prefill program reads: pure choices.

A step launches such programs until its budget is spent. Several prompts may wait to be read. The
one that came first has a place in at least every second program, so that nobody starves. In the
others, prompts with the least left come first, so that a short one does not wait for a long one.
Prompts that need the same width are read together, and places that would only be padding are given
to others.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxspec.engine.plan.plan import WEIGHTS, Plan, Shapes
from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule.record import Ledger

CALL = 128
"""What a program costs besides, as the arithmetic of so many tokens."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one prefill program reads."""

    batch: int
    width: int
    """Most tokens of each prompt."""
    rows: tuple[int, ...]
    """The prompts that it reads, as places in the order in which they came."""

    @property
    def tokens(self) -> int:
        """Tokens that it computes, padding among them."""
        return self.batch * self.width


@dataclasses.dataclass(frozen=True)
class Allowance:
    """How much may be read in a step."""

    until: int
    """Tokens computed since the last decode step, at which reading ends."""
    once: bool
    """Whether a prompt is read at most once between two decode steps."""


def allowance_of(plan: Plan, ledger: Ledger, ready: Sequence[Request]) -> Allowance:
    """What may be read before these requests decode. A step launches no more than the budget. As
    long as none of them has more than its first token, there may be several such steps, until each
    slot has read a chunk: so requests that come together begin together."""
    if any(request.num_tokens > 1 for request in ready):
        return Allowance(plan.prefill_budget, once=True)
    until = ledger.read_since_decode + plan.prefill_budget
    if ready:
        first_chunks = plan.num_slots * plan.shapes.widest_chunk
        until = min(until, max(plan.prefill_budget, first_chunks))
    return Allowance(until, once=bool(ready))


def choose_prefill(
    shapes: Shapes, ledger: Ledger, running: Sequence[Request], allowance: Allowance
) -> tuple[Chunk, list[Request]] | None:
    """The next program for the prompts of these requests, and those that it reads."""
    done = ledger.read_for if allowance.once else ()
    unread = [one for one in running if not one.is_prefilled and one.id not in done]
    unread.sort(key=lambda request: request.id)  # ids are given in the order of coming
    left = [request.next_halt - request.prefilled for request in unread]
    others_first = bool(unread) and unread[0].id in ledger.read_last
    spent = ledger.read_since_decode
    chunk = choose_chunk(shapes, left, allowance.until - spent, not spent, others_first)
    return None if chunk is None else (chunk, [unread[row] for row in chunk.rows])


def choose_chunk(
    shapes: Shapes, left: Sequence[int], budget: int, must: bool, others_first: bool = False
) -> Chunk | None:
    """The next program for prompts with so many tokens left until they end or make a halt, in the
    order in which they came.

    It computes no more than `budget` tokens, except if there `must` be one. `others_first`: the
    prompt that came first was read by the program before.
    """
    leads = _ranked(shapes, left)
    if others_first:
        leads = [*leads[1:], *leads[:1]]
    for lead in leads:
        if fitting := [one for one in _shapes_for(shapes, left[lead]) if _tokens(one) <= budget]:
            return _filled(shapes, left, lead, fitting)
    if not (must and leads):
        return None
    return _filled(shapes, left, leads[0], [min(_shapes_for(shapes, left[leads[0]]), key=_tokens)])


def chunks_of(
    shapes: Shapes, left: Sequence[int], budget: int, saves_every: int = 0
) -> Iterator[Chunk]:
    """The programs that read these prompts to their ends, if no others come. Each of them makes a
    halt at the last multiple of `saves_every` before its end, if that is not 0."""
    left, spent, others_first = list(left), 0, False
    after = [(count - 1) % saves_every + 1 if saves_every else 0 for count in left]
    until_halt = lambda row: left[row] - after[row] or after[row]
    while rows := [row for row, count in enumerate(left) if count]:
        unread = [until_halt(row) for row in rows]
        chunk = choose_chunk(shapes, unread, budget - spent, not spent, others_first)
        if chunk is None:
            spent = 0
            continue
        spent, others_first = spent + chunk.tokens, 0 in chunk.rows
        chunk = dataclasses.replace(chunk, rows=tuple(rows[row] for row in chunk.rows))
        yield chunk
        for row in chunk.rows:
            left[row] -= min(chunk.width, until_halt(row))


def _ranked(shapes: Shapes, left: Sequence[int]) -> list[int]:
    """The prompt that came first, then the others, those with the fewest programs left first."""
    rank = lambda row: (-(-left[row] // shapes.widest_chunk), shapes.width_for(left[row]))
    return [*range(len(left))[:1], *sorted(range(1, len(left)), key=rank)]


def _shapes_for(shapes: Shapes, count: int) -> list[tuple[int, int]]:
    width = shapes.width_for(count)
    return [shape for shape in shapes.prefill_shapes if shape[1] == width]


def _filled(
    shapes: Shapes, left: Sequence[int], lead: int, fitting: Sequence[tuple[int, int]]
) -> Chunk:
    """The program that reads this prompt and others of its width at the least cost for each."""
    width = fitting[0][1]
    others = [row for row in _ranked(shapes, left) if row != lead]
    alike = [row for row in others if shapes.width_for(left[row]) == width]
    narrower = [row for row in others if shapes.width_for(left[row]) < width]
    count = 1 + len(alike)
    batch, _ = min(fitting, key=lambda shape: _cost(shape) / min(shape[0], count))
    return Chunk(batch, width, tuple(sorted([lead, *alike, *narrower][:batch])))


def _cost(shape: tuple[int, int]) -> int:
    return max(_tokens(shape), WEIGHTS) + CALL


def _tokens(shape: tuple[int, int]) -> int:
    batch, width = shape
    return batch * width
