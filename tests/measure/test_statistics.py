"""Statistics against counts made by hand."""

import pytest

from jaxspec.console.report import speculation_line, stats_object
from jaxspec.engine.requests.advance import emit, end
from jaxspec.engine.requests.output import output_of
from jaxspec.engine.requests.request import NewTokens, Request
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.stats.acceptance import AcceptanceCounts, PooledStats, RequestStats, pool
from jaxspec.text.stream import TextStream, stop_scan

PLACES = 3


def served(steps, max_tokens=100, stop_ids=(), submitted=1.0, seated=1.5):
    """Statistics of a request with these steps: (tokens, drafts verified, time), prefill first."""
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(
        1, (5, 6), params, frozenset(stop_ids), 0, TextStream(), stop_scan(()), submitted, slot=0
    )
    object.__setattr__(request, "seated_at", seated)
    for tokens, drafts, now in steps:
        assert request.finish_reason is None, "the case goes on after its end"
        request, _ = emit(request, NewTokens(list(tokens), drafts, [], now), None)
    if request.finish_reason is None:
        request, _ = end(request, "abort")
    return output_of(request, PLACES).stats


def check(stats: AcceptanceCounts, **expected):
    for name, value in expected.items():
        assert getattr(stats, name) == pytest.approx(value), name


def test_three_steps():
    stats = served([((1,), 0, 2.0), ((2, 3), 3, 2.2), ((4,), 3, 2.3), ((5, 6, 7, 8), 3, 2.6)])
    check(
        stats,
        num_spec_steps=3,
        num_draft_tokens=9,
        num_accepted_draft_tokens=4,
        mean_acceptance_length=7 / 3,
        draft_acceptance_rate=4 / 9,
        drafted_per_position=(3, 3, 3),
        reached_per_position=(3, 2, 1),
        accepted_per_position=(2, 1, 1),
        acceptance_rate_per_position=(2 / 3, 1 / 3, 1 / 3),
        conditional_acceptance_rate_per_position=(2 / 3, 1 / 2, 1),
        acceptance_histogram=(1, 1, 0, 1),
        acceptance_lengths=(2, 1, 4),
        prompt_tokens=2,
        generation_tokens=8,
        tokens_per_step=7 / 3,
        queue_s=0.5,
        ttft_s=1.0,
        decode_s=0.6,
        tpot_s=0.6 / 7,
        itl_s=(0.2, 0.1, 0.3),
    )


def test_a_stop_inside_a_span_cuts_the_reply_and_not_the_drafters_count():
    stats = served([((1,), 0, 2.0), ((2, 9, 3, 4), 3, 3.0)], stop_ids=[9])
    check(
        stats,
        generation_tokens=3,
        acceptance_lengths=(4,),
        num_accepted_draft_tokens=3,
        acceptance_histogram=(0, 0, 0, 1),
        tokens_per_step=2.0,
        tpot_s=0.5,
    )


def test_a_budget_cuts_likewise():
    stats = served([((1,), 0, 2.0), ((2, 3, 4), 3, 3.0)], max_tokens=2)
    check(stats, generation_tokens=2, mean_acceptance_length=3.0, tokens_per_step=1.0)


def test_a_step_with_fewer_drafts_is_no_failure_of_the_later_places():
    stats = served([((1,), 0, 2.0), ((2, 3), 1, 2.5), ((4, 5, 6), 2, 3.0), ((7,), 3, 3.5)])
    check(
        stats,
        drafted_per_position=(3, 2, 1),
        reached_per_position=(3, 1, 0),
        accepted_per_position=(2, 1, 0),
        num_draft_tokens=6,
        num_accepted_draft_tokens=3,
        acceptance_rate_per_position=(2 / 3, 1 / 3, 0),
        conditional_acceptance_rate_per_position=(2 / 3, 1.0, 0),
    )


def test_steps_without_drafts_are_plain_decoding():
    stats = served([((1,), 0, 2.0), ((2,), 0, 3.0), ((3, 4), 3, 4.0), ((5,), 0, 5.0)])
    check(stats, num_spec_steps=1, num_draft_tokens=3, mean_acceptance_length=2.0)
    check(stats, itl_s=(1, 1, 1), tpot_s=3 / 4)


def test_nothing_divides_by_zero():
    check(served([]), ttft_s=0, tpot_s=0, itl_s=(), mean_acceptance_length=1)
    check(served([((1,), 0, 2.0)]), draft_acceptance_rate=0, tpot_s=0, tokens_per_step=0)
    check(PooledStats(), mean_acceptance_length=1, mean_acceptance_length_per_request=1)


def test_pooled_rates_weigh_by_steps_and_per_request_ones_do_not():
    short = served([((1,), 0, 2.0), ((2, 3, 4, 5), 3, 3.0)])
    long = served([((1,), 0, 2.0), ((2,), 3, 3.0), ((3,), 3, 4.0), ((4,), 3, 5.0)])
    plain = served([((1,), 0, 2.0), ((2,), 0, 3.0)])
    pooled = pool([short, long, plain])
    check(
        pooled,
        num_requests=3,
        prompt_tokens=6,
        generation_tokens=11,
        num_spec_steps=4,
        num_draft_tokens=12,
        num_accepted_draft_tokens=3,
        mean_acceptance_length=7 / 4,
        mean_acceptance_length_per_request=(4 + 1) / 2,
        acceptance_rate_per_position=(1 / 4,) * 3,
        conditional_acceptance_rate_per_position=(1 / 4, 1, 1),
        acceptance_histogram=(3, 0, 0, 1),
    )
    assert pool([long, plain], pool([short])) == pooled


def test_counts_stay_within_what_was_drafted():
    stats = served([((1,), 0, 2.0), ((2, 3), 1, 2.5), ((4, 5, 6), 2, 3.0), ((7,), 3, 3.5)])
    for drafted, reached, accepted in zip(
        stats.drafted_per_position, stats.reached_per_position, stats.accepted_per_position
    ):
        assert accepted <= reached <= drafted <= stats.num_spec_steps
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps


def test_json_has_every_definition_once_by_name():
    fields = stats_object(served([((1,), 0, 2.0), ((2, 3), 3, 2.5)]))
    assert fields["num_draft_tokens"] == 3 and fields["acceptance_histogram"] == (0, 1, 0, 0)
    assert {"ttft_s", "tpot_s", "itl_s", "queue_s", "synthetic"} <= set(fields)


def test_a_drawn_acceptance_is_marked():
    stats = RequestStats(prompt_tokens=1, generation_tokens=1, num_spec_steps=1, synthetic=True)
    assert speculation_line(pool([stats]))[0].startswith("SYNTHETIC")
