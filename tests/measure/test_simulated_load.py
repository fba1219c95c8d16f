"""The simulation of loads: its clock, and what it says about the loop."""

import dataclasses
import pathlib
import sys

import jaxtyping
import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def without_checked_shapes(monkeypatch):
    """They take nearly all of the time."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def simulation():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import simulate_load

        yield simulate_load
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def times(simulation):
    return simulation.read_times()


def test_one_request_takes_what_its_programs_take(simulation, times):
    """Programs of one request run one after the other, and the host works beside them."""
    engine = simulation.simulated_engine(times, 1)
    [life] = simulation.lived(engine, [simulation.Arrival(0.0, 512, 64)], at_once=1)
    device = simulation.device_of(engine)
    names = [name for name, _, _ in device.launched]
    assert names == ["prefill"] + ["decode"] * (len(names) - 1) and life.tokens == 64
    first = times.admission + 2 * times.per_program + times.prefill(512, 0)
    assert life.first_token_ms == pytest.approx(first + times.per_request, abs=1)
    steps = (life.times[-1] - life.times[0]) / times.decode[1]
    assert steps == pytest.approx(len(life.times) - 1, abs=0.2)
    assert device.busy == pytest.approx(
        times.prefill(512, 0) + (len(names) - 1) * times.decode[1], rel=1e-9
    )


def test_a_pass_is_the_same_every_time_and_below_its_ideal(simulation, times):
    one, again = (simulation.whole_pass(times, 4) for _ in range(2))
    assert one == again
    assert 0.6 < one["share"] < 1 and one["device_busy"] <= 1.02
    assert one["share"] == pytest.approx(one["tokens_per_s"] / one["ideal_tokens_per_s"])
    other = simulation.whole_pass(times, 4, seed=7)
    assert other["drawn_length"] != one["drawn_length"]


def test_who_decodes_waits_for_one_chunk_of_a_long_prompt_and_the_short_one_behind_it_comes_soon(
    simulation, times
):
    row = simulation.beside_a_long_prompt(times, 8)
    step = times.decode[16]
    chunk = times.prefill(512, 512 * simulation.LONG)
    assert step < row["gap_ms_max"] < step + chunk + times.least + 1, "the short one is in one gap"
    assert row["short_first_token_ms"] < 2 * (step + chunk) < row["long_first_token_ms"]


def test_a_prompt_that_a_decode_step_reads_makes_gaps_as_long_as_more_requests_do(
    simulation, times
):
    off, on = (
        simulation.while_prompts_arrive(times, 8, prefill_beside_decoding=tokens)
        for tokens in (0, 128)
    )
    assert off["gap_ms_p50"] == pytest.approx(times.decode[8])
    assert on["gap_ms_p50"] == pytest.approx(times.decode[8])
    assert off["gap_ms_p99"] > times.decode[16] + times.prefill(512, 0)
    assert on["gap_ms_p99"] == pytest.approx(times.mixed(8, 8, 384 * 128), abs=0.1)
    assert times.mixed(8, 8, 0) == times.decode[16] and on["gap_p99_over_p50"] < 1.3
    assert on["first_token_ms_p50"] < 4 * times.mixed(9, 8, 0) + times.decode[16] + 5
    assert times.mixed(32, 16, 0) == pytest.approx(2 * times.decode[32] - times.decode[16])


def test_a_smaller_budget_makes_shorter_gaps_and_later_first_tokens(simulation, times):
    small, large = (simulation.burst(times, 16, 16, prefill_budget=b) for b in (256, 2048))
    assert small["gap_ms_max"] < times.decode[32] + times.prefill(4 * 64, 0) + times.admission
    assert small["gap_ms_max"] < large["gap_ms_max"]
    assert small["first_token_ms_max"] > large["first_token_ms_max"]


def test_many_short_prompts_are_read_before_the_first_of_them_decodes(simulation, times):
    row = simulation.burst(times, 0, 32)
    eight = 8 * times.prefill(4 * 64, 0) + 4 * times.admission
    assert row["first_token_ms_max"] < eight + 20


def test_whole_passes_reach_their_bar(simulation, times):
    """As long as a step of 24 requests, which was not measured, takes less than 14.5 ms."""
    assert times.decode[24] == pytest.approx((times.decode[16] + times.decode[32]) / 2)
    slower = dataclasses.replace(times, decode=times.decode | {24: 14.5})
    assert simulation.whole_passes(slower, 32)["share"] > 0.88


@pytest.mark.parametrize("options", [{}, {"batch_sizes": (1, 32)}])
def test_gaps_of_16_streams_keep_to_their_bar_while_prompts_arrive(simulation, times, options):
    row = simulation.while_prompts_arrive(times, 16, **options)
    assert row["gap_p99_over_p50"] < simulation.BAR
    assert row["long_gaps"] == {"share": 0.0, "programs": {}}


def test_it_says_what_ran_in_the_gaps_that_are_too_long(simulation, times):
    row = simulation.while_prompts_arrive(times, 8, prefill_beside_decoding=0)
    long = row["long_gaps"]
    assert row["gap_p99_over_p50"] > simulation.BAR and 0 < long["share"] < 0.2
    assert max(long["programs"], key=long["programs"].get) == "prefill 1 x 512 + decode 16 x 16"


def test_unsteady_steps_vary_as_those_of_the_server_did(simulation):
    times = simulation.read_times(unsteady=True)
    random = np.random.default_rng(1)
    drawn = [times.drawn(10.0, random) for _ in range(20_000)]
    p50, p95, p99 = np.quantile(drawn, [0.5, 0.95, 0.99])
    assert p50 == pytest.approx(10, rel=0.01)
    assert (p95 / 10, p99 / 10) == pytest.approx(times.spread, rel=0.01)
    assert np.mean(drawn) == pytest.approx(10, rel=0.01) and times.spread[0] > 1.05
