"""What being able to drop drafts takes of a step, from a trace."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest
from test_scripts import SCRIPTS


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("rollback_share")
    kernels = {
        "block_fold_mosaic_gpu_kernel": 250_000,
        "block_read_mosaic": 400_000,
        "gemm": 4_350_000,
    }
    events = [SimpleNamespace(name=name, duration_ns=ns) for name, ns in kernels.items()] * 3
    monkeypatch.setattr(script, "read_planes", lambda folder: [folder.name])
    monkeypatch.setattr(script, "device_events", lambda planes: events)
    return script


def run(script, monkeypatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rollback_share.py", "traces", *options])
    with pytest.raises(SystemExit) as ended:
        script.main()
    return int(ended.value.code)


def test_folding_and_the_bytes_for_it_are_counted(script, monkeypatch, tmp_path, capsys):
    file = tmp_path / "share.json"
    assert run(script, monkeypatch, "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert (found["step_ms"], found["fold_ms"], found["read_ms"]) == pytest.approx((5, 0.25, 0.4))
    of_token, of_request = 2048 * 2 + 4096 * 4, 32 * 128 * 4
    assert found["bytes_written_for_the_fold"] == 24 * 8 * (16 * of_token + of_request)
    assert found["share"] == pytest.approx((0.25 + found["writing_them_ms"]) / 5)
    assert "share" in capsys.readouterr().out


def test_a_larger_share_than_allowed_fails(script, monkeypatch):
    assert run(script, monkeypatch, "--most", "0.04") == 1
