"""An exception at every line of the engine: a part of what `scripts/sweep_faults.py` runs."""

import collections
import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest
import sweep_configs
import sweeping
from golden_pair import golden_engine, trajectories
from sweeping import Ask, Asks, Injection

CONFIGS = sweep_configs.fakes()
ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "sweep_faults.py"


@pytest.mark.slow
def test_an_exception_at_any_line_costs_nobody_a_token(tmp_path):
    """In a process of its own, in which nothing checks the types of every call."""
    report = tmp_path / "sweep.json"
    command = [sys.executable, SCRIPT, "--each-line-once", "--signals", "24", "--json", report]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = json.loads(report.read_text())
    total = counts["total"]
    assert total["lines"] == sum(row["lines"] for row in counts["rows"].values())
    assert min(row["lines"] for name, row in counts["rows"].items() if name != "signals") > 500
    print(f"\n{done.stdout.splitlines()[-1]}")
    assert total["injections"] > 550 and not total["wrong"]
    ends = total["outcomes"]
    assert "was not reached" not in ends
    assert ends["right"] > 1000 and ends["raised to its caller"] > 100
    assert ends["ended with the fault as its error"] > 50


def test_lines_and_outcomes_of_all_parts_are_added_up():
    Row = runpy.run_path(str(SCRIPT))["Row"]
    parts = [Row(lines=7, injections=3), Row(injections=2, wrong=["a"]), Row(lines=5)]
    total = sum(parts, Row())
    assert (total.lines, total.injections, total.wrong) == (12, 5, ["a"])


def test_a_sample_on_a_real_engine():
    """The same with the golden pair's programs in place of numpy functions."""
    engine = golden_engine()
    ask = lambda at, tokens, **params: Ask(
        tuple(trajectories()[at]["prompt"][:20]), sweep_configs.greedy(tokens, **params)
    )
    asks = Asks(
        bystander=ask(1, 14),
        submitted=ask(2, 8),
        aborted=ask(3, 12),
        left=(ask(4, 9),),
        generated=(ask(5, 8), ask(6, 8, temperature=0.7, seed=3)),
        after=ask(3, 5),
    )
    true = sweeping.truth(engine, asks)
    lines = sweeping.counted(lambda: sweeping.run(engine, asks, []))
    every, ends = list(sweeping.injections(lines)), collections.Counter()
    chosen = every[:: len(every) // 24]
    for injection in chosen:
        ends += sweeping.outcomes(engine, asks, true, injection)
    assert len(chosen) >= 24 and ends["right"] > len(chosen)


def test_the_sweep_notices_tokens_that_are_lost():
    """The oracle's own test: a stream that drops an increment is found out."""
    config = CONFIGS["overlapped none"]
    true, engine = config.truth(), config.make()
    take, calls = engine.loop._take, []

    def forgetful(of, into):
        take(of, into)
        if of == {1} and into:  # the bystander's
            calls.append(of)
            if len(calls) == 2:
                into.popleft()

    engine.loop._take = forgetful
    line = next(iter(config.lines()))
    with pytest.raises(sweeping.Wrong):
        sweeping.outcomes(engine, config.asks, true, Injection(line, MemoryError, 10**6))
