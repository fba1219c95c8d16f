"""Whether one request's lookups are worth verifying, from how its earlier ones fared."""

import dataclasses

from jaxspec.proposers.options import SpeculationOptions

WEIGHT = 0.2
"""Of the newest step in the running rate."""
PATIENCE = 8
"""Tries in vain until the pauses between two of them grow no longer."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """One request's record."""

    rate: float = 0.0
    """Running share of drafts that were accepted."""
    judged: int = 0
    """Steps with drafts."""
    since: int = 0
    """Steps without drafts since the last one with them."""


def is_open(gate: Gate, options: SpeculationOptions) -> bool:
    """While it warms up, while its drafts are accepted, and to try again after pauses that grow."""
    in_vain = gate.judged - options.ngram_warm_up
    return (
        in_vain < 0
        or gate.rate >= options.ngram_threshold
        or gate.since >= options.ngram_probe_every * min(1 + in_vain, PATIENCE)
    )


def after_drafts(gate: Gate, share: float) -> Gate:
    """After a step that accepted this share of the request's drafts.

    The first steps weigh the same, so that the rate does not start from a guess.
    """
    judged = gate.judged + 1
    return Gate(gate.rate + max(WEIGHT, 1 / judged) * (share - gate.rate), judged)


def after_none(gate: Gate) -> Gate:
    """After a step without drafts of its own."""
    return dataclasses.replace(gate, since=gate.since + 1)
