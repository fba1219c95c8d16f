"""What is proposed in a step, and for whom: every row gets a span of drafts, of 0 to width - 1."""

import dataclasses
from collections.abc import Sequence

from jaxtyping import Array, Int

from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.step.io import Drafts
from jaxspec.engine.step.upload import block_of, filled, padded


@dataclasses.dataclass(frozen=True)
class Proposals:
    """Who drafts in one step, by request of its rows."""

    from_host: tuple[Sequence[int], ...]
    """Spans that the host proposes; empty where it has none."""
    from_device: tuple[int, ...]
    """Drafts to take from the drafter's block, or from what the device looks up."""

    def tier(self, plan: Plan) -> dict[str, int]:
        """How wide to draft. Spans of the host fit into the whole block only."""
        return {} if any(self.from_host) else plan.tier(1 + max(self.from_device))


def propose(loop: Loop, requests: list[Request]) -> Proposals:
    """Asks the host's proposer, and gives every request that speculates the device's drafts."""
    spans = tuple(_host_span(loop, request) for request in requests)
    if loop.plan.lookup:
        # Once a step is wide because of one, it costs nothing more to look up for all.
        most, spans = (loop.plan.width - 1 if any(spans) else 0), ((),) * len(spans)
    else:
        most = _width(loop, requests) - 1 if loop.plan.drafter else 0
    return Proposals(
        from_host=spans,
        from_device=tuple(most if request.params.speculate else 0 for request in requests),
    )


def _width(loop: Loop, requests: list[Request]) -> int:
    if loop.spans is None:
        return loop.plan.width
    rows = loop.plan.shapes.rows_for(len(requests))
    return loop.spans.width(rows, [request.id for request in requests])


def _host_span(loop: Loop, request: Request) -> Sequence[int]:
    """No longer than the budget: the last token is the target's own."""
    left = request.params.max_tokens - len(request.token_ids)
    room = min(loop.plan.width, left) - 1
    if loop.proposer is None or room < 1 or not request.params.speculate:
        return ()
    return loop.proposer.propose(request.id, room)


def draft(loop: Loop, slots: Int[Array, " rows"], proposals: Proposals, draws: bool) -> Drafts:
    """Drafts of every row. There is no column where nobody drafts; with `exact` there is."""
    rows, width = slots.size, loop.plan.width - 1
    lengths = padded(tuple(map(len, proposals.from_host)), rows, 0)
    if any(proposals.from_device):
        drafts = _drafts_of_the_device(loop, slots, proposals, draws)
        if not any(proposals.from_host):
            return drafts
        spans = block_of(proposals.from_host, rows, width)
        mine = drafts.tokens, drafts.num_drafts, spans, lengths, drafts.logits
        return loop.device.run("replace_step", *mine)
    if any(proposals.from_host):
        return Drafts(block_of(proposals.from_host, rows, width), lengths)
    return Drafts(filled((rows, width if loop.plan.exact else 0), 0), lengths)


def _drafts_of_the_device(
    loop: Loop, slots: Int[Array, " rows"], proposals: Proposals, draws: bool
) -> Drafts:
    num_drafts = padded(proposals.from_device, slots.size, 0)
    if loop.plan.lookup:
        return loop.device.run("lookup_step", slots, num_drafts, lookup=loop.plan.lookup)
    tier = proposals.tier(loop.plan)
    if draws and loop.plan.drawn_drafts:
        tokens, logits = loop.device.run("drawn_draft_step", slots, **tier)
        return Drafts(tokens, num_drafts, logits)
    return Drafts(loop.device.run("draft_step", slots, **tier), num_drafts)
