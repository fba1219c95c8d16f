"""Peers' step times beside ours."""

import json

import pytest

from jaxspec.errors import LoadError, UsageError
from jaxspec.measure.peers import peer_table, read_peers, steady_decode

ROWS = [
    {"system": "X 1", "model": "Qwen3-8B", "mode": m, "concurrency": 4, "step_ms_median": t}
    for m, t in (("plain", 5.0), ("dflash", 8.0))
]
OURS = [
    {"method": method, "concurrency": 4, "step_ms": {"p50": step},
     "speculation": {"mean_acceptance_length": length}}
    for method, step, length in (("none", 4.0, 1.0), ("dflash", 10.0, 5.0))
]  # fmt: skip


def test_all_on_equal_terms(tmp_path):
    file = tmp_path / "peers.json"
    other = {**ROWS[0], "model": "Qwen3-4B"}
    without = {key: value for key, value in ROWS[0].items() if key != "step_ms_median"}
    file.write_text(json.dumps({"rows": [*ROWS, other, without]}))
    found = steady_decode(OURS, read_peers(str(file), "qwen3-8b"))
    rates = {(row["system"], row["mode"]): row["tokens_per_s"] for row in found}
    assert rates == {
        ("jaxspec", "plain"): 1000, ("jaxspec", "dflash"): 2000,
        ("X 1", "plain"): 800, ("X 1", "dflash"): 2500,
    }  # fmt: skip
    assert "2500.0" in peer_table(found)[-1]


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{}]}', '{"rows": []}'])
def test_a_file_of_something_else(tmp_path, text):
    (tmp_path / "peers.json").write_text(text)
    with pytest.raises(UsageError, match="anchors .*peers.json"):
        read_peers(str(tmp_path / "peers.json"), "qwen3-8b")


def test_no_file(tmp_path):
    with pytest.raises(LoadError, match="cannot be read"):
        read_peers(str(tmp_path / "none"), "qwen3-8b")
