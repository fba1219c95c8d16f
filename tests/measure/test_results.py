"""Rows of the table, from made-up runs."""

import pytest

from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.stats.acceptance import RequestStats
from jaxspec.measure.floor import StepBytes
from jaxspec.measure.load import Load, Run, due_times
from jaxspec.measure.results import Row, add_speedups, percentiles, row_of, table


def run(seconds, *lengths, step=0.01):
    outputs = tuple(
        RequestOutput(
            (1,) * 10, (2,) * tokens, "", "length", None, None,
            RequestStats(prompt_tokens=10, generation_tokens=tokens, decode_s=0.1 * (tokens - 1)),
        )
        for tokens in lengths
    )  # fmt: skip
    return Run(seconds, outputs, (step, step, 2 * step))


def row(method, concurrency, runs, label="") -> Row:
    named: Row = {"method": method, "acceptance_of": label}
    return named | row_of(concurrency, runs, LEAST, 1e5)


LEAST = StepBytes(verify=1000, draft=0, target_position=2, draft_position=0)


def test_a_row():
    measured = row("none", 4, [run(1.0, 10, 30), run(2.0, 10, 30)])
    assert measured["output_tokens_per_s"] == {"median": 30, "min": 20, "max": 40}
    assert measured["step_ms"]["p50"] == pytest.approx(10)
    assert measured["tpot_ms"]["p50"] == pytest.approx(100)
    context = 10 + (10 + 30) / 2 / 2
    assert measured["floor_ms"] == pytest.approx(1e3 * (1000 + 4 * context * 2) / 1e5)
    assert measured["floor_fraction"] == pytest.approx(measured["floor_ms"] / 10)
    assert measured["finish_reasons"] == {"length": 4}
    assert measured["speculation"]["generation_tokens"] == 80


def test_speedups_are_of_the_same_pass_and_concurrency():
    plain = row("none", 1, [run(1.0, 10), run(4.0, 10)])
    fast = row("dflash", 1, [run(0.5, 10), run(1.0, 10)], "HumanEval")
    alone = row("dflash", 2, [run(0.5, 10)])
    add_speedups([plain, fast, alone], "none")
    assert fast["speedup"] == {"median": 3, "min": 2, "max": 4}
    assert "speedup" not in alone
    lines = table([plain, fast, alone]).splitlines()
    assert len({len(line) for line in lines}) == 1, "columns line up"
    assert "3.00x" in lines[3] and "floor" in lines[1]
    assert len(lines[0]) <= 100
    assert " plain " in lines[2] and "dflash HumanEval" in lines[3]


def test_nothing_measured_is_no_number():
    assert percentiles([]) == {}
    measured = row("none", 1, [Run(1.0, run(1.0, 1).outputs, ())])
    assert measured["floor_fraction"] is None and measured["tpot_ms"] == {}
    assert "floor" not in table([measured])


def test_percentiles_are_no_extremes():
    """Of 1 to 101 the median is 51, and one larger value in a hundred lies beyond the 99th."""
    values = [float(value) for value in range(1, 102)]
    assert percentiles(values) == {"p50": 51, "p90": 91, "p99": 100}
    assert percentiles([3.0, 1.0]) == pytest.approx({"p50": 2.0, "p90": 2.8, "p99": 2.98})


def test_arrivals():
    assert due_times(3, Load(1)) == [0, 0, 0]
    times = due_times(4000, Load(1, request_rate=20.0, seed=1))
    assert times == sorted(times) and times[-1] == pytest.approx(200, rel=0.1)
    assert times == due_times(4000, Load(1, 20.0, 1)) != due_times(4000, Load(1, 20.0, 2))
