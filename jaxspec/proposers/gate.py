"""Whether one request's lookups are worth verifying, from how its earlier ones fared."""

import dataclasses

from jaxspec.proposers.options import SpeculationOptions

WEIGHT = 0.2
"""Of the newest step in the running rate."""


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
    """While it warms up, while its drafts are accepted, and now and then to try again."""
    return (
        gate.judged < options.ngram_warm_up
        or gate.rate >= options.ngram_threshold
        or gate.since >= options.ngram_probe_every
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
