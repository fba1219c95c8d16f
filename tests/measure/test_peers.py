"""Other systems' step times, compared with ours."""

import json

import pytest

from jaxspec.errors import LoadError, UsageError
from jaxspec.measure.peers import read_peers, steady_decode
from jaxspec.measure.results import steady_table

ROWS = [
    {"system": "X 1", "model": "Qwen3-8B", "mode": m, "concurrency": 4, "step_ms_median": t}
    for m, t in (("plain", 5.0), ("dflash", 8.0))
]


def ours(method, step, length, label="", drawn=None):
    drawn = {} if drawn is None else {"drawn_length": drawn}
    step_ms = {"p50": step} if step else {}
    return {
        "method": method, "acceptance_of": label, "concurrency": 4, "step_ms": step_ms,
        "speculation": {"mean_acceptance_length": length}, **drawn,
    }  # fmt: skip


def peers_in(tmp_path):
    file = tmp_path / "peers.json"
    other = {**ROWS[0], "model": "Qwen3-4B"}
    elsewhere = {**ROWS[0], "concurrency": 5}
    without = {key: value for key, value in ROWS[0].items() if key != "step_ms_median"}
    file.write_text(json.dumps({"rows": [*ROWS, other, elsewhere, without]}))
    return read_peers(str(file), "qwen3-8b")


def rates(steady):
    return {(row["system"], row["name"]): row["tokens_per_s"] for row in steady}


def test_all_on_equal_terms(tmp_path):
    rows = [ours("none", 4.0, 1.0), ours("dflash", 10.0, 5.0), ours("ngram", 5.0, 2.0)]
    steady = steady_decode(rows, peers_in(tmp_path))
    assert rates(steady) == {
        ("jaxspec", "plain"): 1000, ("jaxspec", "dflash"): 2000, ("jaxspec", "ngram"): 1600,
        ("X 1", "plain"): 800, ("X 1", "dflash"): 2500,
    }  # fmt: skip
    lines = steady_table(steady)
    assert "8.00" in lines[-1] and "2500" in lines[-1] and "-" in lines[-1].split()
    assert len({len(line) for line in lines[1:]}) == 1, "columns line up"


def test_drawn_lengths_share_one_step_and_count_as_asked_for(tmp_path):
    rows = [
        ours("dflash", 9.0, 5.2, "GSM8K", drawn=6.0),
        ours("dflash", 11.0, 3.1, "MT-Bench", drawn=3.0),
        ours("dflash", None, 7.9, "MATH-500", drawn=8.0),
    ]
    tokens_per_s = rates(steady_decode(rows, peers_in(tmp_path)))
    assert tokens_per_s["jaxspec", "dflash GSM8K"] == pytest.approx(1e3 * 4 * 6 / 10)
    assert tokens_per_s["jaxspec", "dflash MATH-500"] == pytest.approx(1e3 * 4 * 8 / 10)
    assert tokens_per_s["X 1", "dflash MT-Bench"] == pytest.approx(1e3 * 4 * 3 / 8)


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{}]}', '{"rows": []}'])
def test_a_file_of_something_else(tmp_path, text):
    (tmp_path / "peers.json").write_text(text)
    with pytest.raises(UsageError, match="anchors .*peers.json"):
        read_peers(str(tmp_path / "peers.json"), "qwen3-8b")


def test_no_file(tmp_path):
    with pytest.raises(LoadError, match="cannot be read"):
        read_peers(str(tmp_path / "none"), "qwen3-8b")
