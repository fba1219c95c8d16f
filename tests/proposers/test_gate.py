"""When a request may draft: warm-up, threshold, probing; each request for itself."""

from collections.abc import Sequence

import pytest

from jaxspec.proposers.gate import Gate, after_drafts, after_no_drafts, is_open
from jaxspec.proposers.ngram import NgramProposer, long_matches
from jaxspec.proposers.options import SpeculationOptions

OPTIONS = SpeculationOptions(ngram_threshold=0.3, ngram_warm_up=3, ngram_probe_every=4)


def gate_after(shares: Sequence[float]) -> Gate:
    gate = Gate()
    for share in shares:
        gate = after_drafts(gate, float(share))
    return gate


@pytest.mark.parametrize("share", [0.0, 0.29, 0.3, 1.0])
def test_the_rate_is_a_share_from_the_first_step_on(share):
    assert gate_after([share]).rate == pytest.approx(share)
    assert gate_after([share] * 20).rate == pytest.approx(share)
    assert is_open(gate_after([share] * 3), OPTIONS) == (share >= 0.3)


def test_early_steps_weigh_the_same_and_later_ones_fade():
    assert gate_after([1, 0, 0, 0]).rate == pytest.approx(1 / 4)
    assert gate_after([0] * 10 + [1]).rate == pytest.approx(0.2)


def test_it_closes_after_its_warm_up_and_not_before():
    assert is_open(gate_after([0, 0]), OPTIONS)
    assert not is_open(gate_after([0, 0, 0]), OPTIONS)


def test_it_probes_after_pauses_that_grow_and_one_probe_is_one_probe():
    gate, pauses = gate_after([0, 0, 0]), [0]
    while len(pauses) < 12:
        if is_open(gate, OPTIONS):
            gate = after_drafts(gate, 0.0)
            pauses.append(0)
        else:
            gate = after_no_drafts(gate)
            pauses[-1] += 1
    assert pauses[:8] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert pauses[8:11] == [32] * 3


def test_good_probes_open_it_again():
    gate = gate_after([0, 0, 0])
    for _ in range(2):
        gate = after_drafts(gate, 1.0)
    assert gate.rate > 0.3 and is_open(gate, OPTIONS)


def test_a_threshold_of_zero_never_closes():
    assert is_open(gate_after([0] * 50), SpeculationOptions(ngram_threshold=0.0))


REPEATED = ((7, 0), (8, 2))
"""Requests that repeat themselves, and how many of their drafts are accepted."""


def step(proposer: NgramProposer, request: int, accepted: int) -> int:
    """One step in which the request repeats itself and `accepted` drafts are accepted."""
    drafts = proposer.propose(request, 4)
    proposer.commit(request, [1, 2], len(drafts), accepted if drafts else 0)
    return len(drafts)


def test_one_request_s_luck_is_not_another_s():
    proposer = NgramProposer(OPTIONS)
    for request, _ in REPEATED:
        proposer.commit(request, [1, 2, 1, 2])
    unlucky, lucky = ([step(proposer, id, accepted) for _ in range(8)] for id, accepted in REPEATED)
    assert unlucky == [2, 2, 2, 0, 0, 0, 0, 2]
    assert lucky == [2] * 8


def test_drafts_of_others_are_not_judged():
    proposer = NgramProposer(OPTIONS, alone=False)
    proposer.commit(1, [1, 2, 3])
    for token in range(10, 20):
        assert not proposer.propose(1, 4)
        proposer.commit(1, [token], num_drafts=7, accepted=0)
    assert proposer.lookups[1].gate.judged == 0


def test_what_the_device_looked_up_is_judged_though_results_come_a_step_late():
    proposer = NgramProposer(OPTIONS)
    proposer.commit(1, [1, 2, 1, 2])
    assert proposer.propose(1, 4)
    assert proposer.propose(1, 4)
    for _ in range(3):
        proposer.commit(1, [5], num_drafts=4, accepted=0)
    assert proposer.lookups[1].gate.judged == 3
    proposer.commit(1, [2, 5])
    assert not proposer.propose(1, 4)


def test_a_wide_step_in_vain_counts_against_the_request_that_caused_it():
    proposer = NgramProposer(OPTIONS)
    proposer.commit(1, [1, 2, 1])
    proposer.commit(2, [1, 2, 3])
    drafts = [len(proposer.propose(1, 4)) for _ in range(3) if not proposer.commit(1, [1])]
    assert all(drafts) and not proposer.propose(2, 4)
    proposer.commit(1, [1])
    proposer.commit(2, [4])
    assert proposer.lookups[1].gate.judged == 3 and not proposer.propose(1, 4)
    assert proposer.lookups[2].gate.judged == 0


def test_release_forgets_and_may_come_twice():
    proposer = NgramProposer(OPTIONS)
    proposer.commit(1, [1, 2, 1])
    proposer.release(1)
    proposer.release(1)
    proposer.commit(1, [1])
    assert not proposer.propose(1, 4) and len(proposer.lookups) == 1


def test_beside_a_drafter_only_long_matches_count():
    proposer = long_matches(SpeculationOptions(max_ngram=3))
    proposer.commit(1, [1, 2, 3, 4, 9, 2, 3])
    assert not proposer.propose(1, 4)
    proposer.commit(1, [4, 1, 2, 3])
    assert proposer.propose(1, 4) == [4, 9, 2, 3]
