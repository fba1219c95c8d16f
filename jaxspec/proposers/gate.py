"""Whether a request's drafts from prompt lookup are worth verifying, judged by earlier ones."""

import dataclasses

from jaxspec.proposers.options import SpeculationOptions

WEIGHT = 0.2
"""Weight of the newest step in the running rate."""
PATIENCE = 8
"""Number of failed trials after which the pause between trials stops growing."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """How the drafts of one request have done so far."""

    rate: float = 0.0
    """Running share of drafts that were accepted."""
    judged: int = 0
    """Steps with drafts."""
    since: int = 0
    """Steps without drafts since the last one with drafts."""


def is_open(gate: Gate, options: SpeculationOptions) -> bool:
    """Whether the request may draft: during its warm-up, while enough of its drafts are accepted,
    and otherwise for one trial after each pause. The pauses grow."""
    in_vain = gate.judged - options.ngram_warm_up
    return (
        in_vain < 0
        or gate.rate >= options.ngram_threshold
        or gate.since >= options.ngram_probe_every * min(1 + in_vain, PATIENCE)
    )


def after_drafts(gate: Gate, share: float) -> Gate:
    """The record after a step that accepted this share of the request's drafts.

    The first steps have equal weights, so that the rate does not start from a guess.
    """
    judged = gate.judged + 1
    return Gate(gate.rate + max(WEIGHT, 1 / judged) * (share - gate.rate), judged)


def after_no_drafts(gate: Gate) -> Gate:
    """The record after a step in which the request had no drafts from prompt lookup."""
    return dataclasses.replace(gate, since=gate.since + 1)
