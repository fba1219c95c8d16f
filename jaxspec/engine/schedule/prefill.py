"""Chooses what one prefill program reads, by pure functions.

A step launches such programs until its budget is spent. If several prompts wait to be read, the
oldest is in at least every second program, so that none starves. In the other programs, prompts
with the least left to read come first, so that a short one does not wait for a long one. Prompts
that need the same width are read together; rows that would be padding are given to narrower ones.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxspec.engine.plan.plan import WEIGHTS, Plan, Shapes
from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule.record import Ledger

CALL = 128
"""Fixed cost of running a program, in tokens whose arithmetic takes as long."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one prefill program reads."""

    batch: int
    width: int
    """Most tokens of each prompt."""
    rows: tuple[int, ...]
    """Indices of the prompts that it reads, in their order of arrival."""

    @property
    def tokens(self) -> int:
        """Tokens that it computes, including padding."""
        return self.batch * self.width


@dataclasses.dataclass(frozen=True)
class Allowance:
    """How much of the prompts may be read in a step."""

    until: int
    """Reading ends when this many prompt tokens were computed since the last decode step."""
    once: bool
    """Whether a prompt is read at most once between two decode steps."""


def allowance_of(plan: Plan, ledger: Ledger, ready: Sequence[Request]) -> Allowance:
    """How much may be read before these requests decode: one budget per step. As long as none of
    them has more than its first token, there may be several such steps, until each slot could have
    read a chunk, so that requests that come together decode together."""
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
    """The next program for these requests' prompts, and the requests whose prompts it reads. None
    if nothing may be read now."""
    done = ledger.read_for if allowance.once else ()
    unread = [one for one in running if not one.is_prefilled and one.id not in done]
    unread.sort(key=lambda request: request.id)  # ids are given in order of arrival
    left = [request.next_halt - request.prefilled for request in unread]
    others_first = bool(unread) and unread[0].id in ledger.read_last
    spent = ledger.read_since_decode
    chunk = choose_chunk(shapes, left, allowance.until - spent, not spent, others_first)
    return None if chunk is None else (chunk, [unread[row] for row in chunk.rows])


def choose_chunk(
    shapes: Shapes, left: Sequence[int], budget: int, must: bool, others_first: bool = False
) -> Chunk | None:
    """The next program for prompts that have `left` tokens until their end or their next halt, in
    order of arrival.

    It computes at most `budget` tokens, unless there `must` be a program and none is that small.
    `others_first` says that the previous program read the oldest prompt, so others go first now.
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
    """The programs that read these prompts to their ends if no others arrive. If `saves_every` is
    not 0, each prompt has a halt at the last multiple of it before its end."""
    left, spent, others_first = list(left), 0, False
    after = [(count - 1) % saves_every + 1 if saves_every else 0 for count in left]
    until_halt = lambda row: left[row] - (after[row] if left[row] > after[row] else 0)
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
    """The oldest prompt, then the others, those that need the fewest programs first."""
    rank = lambda row: (-(-left[row] // shapes.widest_chunk), shapes.width_for(left[row]))
    return [*range(len(left))[:1], *sorted(range(1, len(left)), key=rank)]


def _shapes_for(shapes: Shapes, count: int) -> list[tuple[int, int]]:
    width = shapes.width_for(count)
    return [shape for shape in shapes.prefill_shapes if shape[1] == width]


def _filled(
    shapes: Shapes, left: Sequence[int], lead: int, fitting: Sequence[tuple[int, int]]
) -> Chunk:
    """The program that reads prompt `lead` with others, at the least cost for each prompt of its
    width. Narrower prompts fill what is left of the batch."""
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
