"""`scripts/bench_exchange.py` on devices of a CPU: what it counts, and what it would notice."""

import importlib
import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[3] / "scripts"))
bench = importlib.import_module("bench_exchange")
TINY = "--rows 2 3 --hidden 256 --calls 4 --exchanges 10".split()


@pytest.mark.parametrize("devices", ["2", "4"])
def test_a_tiny_run(tmp_path, monkeypatch, devices):
    monkeypatch.setenv("JAXSPEC_COMMIT", "0123abc")
    path = tmp_path / "result.json"
    flags = ["--devices", devices, "--implementations", "xla", "psum", "--json", str(path)]
    bench.main([*TINY, *flags])
    result = json.loads(path.read_text())
    assert result["environment"]["commit"] == "0123abc"
    cases = [(row["rows"], row["implementation"]) for row in result["rows"]]
    assert cases == [(2, "xla"), (2, "psum"), (3, "xla"), (3, "psum")]
    for row in result["rows"]:
        times = row["us_per_call"]
        assert 0 < times["least"] <= times["median"] <= times["most"]
        # 3 programs of 4 calls are the first to have 10 exchanges.
        assert row.get("exchanges_with_equal_bits") == {"xla": 12}.get(row["implementation"])


def a_check():
    case = bench.Case(rows=2, hidden=256, devices=2, calls=3, implementation="xla")
    group = bench.group_of(2, 2, 256)
    check = bench.Bits(case, group, bench.inboxes_of(group.memory))
    check.compare()
    return check


def changed(check, change):
    """The same check of a program whose norms are changed."""
    run = check.run

    def other(*given):
        x, normed, inboxes = run(*given)
        return x, change(normed), inboxes

    check.run = other
    return check


def test_other_bits_on_one_device_are_noticed():
    check = changed(a_check(), lambda normed: normed.at[1, 0, 0].multiply(1 + 2.0**-7))
    with pytest.raises(SystemExit, match="device 1: other bits after 6 exchanges"):
        check.compare()


def test_other_bits_of_a_later_run_are_noticed():
    check = changed(a_check(), lambda normed: normed.at[:, 0, 0].multiply(1 + 2.0**-7))
    with pytest.raises(SystemExit, match="device 0: other bits"):
        check.compare()


def test_wrong_numbers_that_are_the_same_everywhere_are_noticed():
    check = a_check()
    check.first = None
    with pytest.raises(SystemExit, match="away from the reference"):
        changed(check, lambda normed: normed * jnp.asarray(1.5, normed.dtype)).compare()


def test_numbers_that_are_none_are_noticed():
    check = a_check()
    check.first = None
    with pytest.raises(SystemExit, match="nan away from the reference"):
        changed(check, lambda normed: normed * jnp.nan).compare()


def test_lateness_is_noticed():
    check = a_check()
    late = np.zeros(2 * 128, np.int32)
    late[130] = 1
    with pytest.raises(SystemExit, match="device 0 did not send"):
        bench.refuse_lateness(bench.dataclasses.replace(check.inboxes, late=jnp.asarray(late)))


def test_the_sum_depends_on_what_every_device_has():
    """Else equal bits would prove nothing."""
    case = bench.Case(rows=2, hidden=256, devices=2, calls=3, implementation="xla")
    group = bench.group_of(2, 2, 256)
    x, products, scale = bench.inputs(case, group)
    run = bench.program(case, group, products_differ=True)
    norms = []
    for device in range(2):
        without = products.at[device].multiply(0)
        _, normed, _ = run(x, without, scale, bench.inboxes_of(group.memory))
        norms.append(np.asarray(normed))
    assert (norms[0] != norms[1]).mean() > 0.5
