"""What the step of a kind of drafter may take, from the files of its measurement."""

import importlib
import json
import sys

import pytest
from test_scripts import SCRIPTS

MB = 1_000_000


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("drafter_bars")


def write(folder, kind: str, width: int, draft_bytes: int, steps: dict[int, float]) -> None:
    report = {
        "kind": kind,
        "draft_bytes": draft_bytes,
        "environment": {"device": "NVIDIA H200"},
        "rows": [{"concurrency": at, f"{kind}_engine_ms": ms} for at, ms in steps.items()],
    }
    (folder / f"steps-8b-{kind}-b{width}-h200.json").write_text(json.dumps(report))


def test_extra_bytes_are_allowed_their_time(script, tmp_path):
    """4.3 MB take a microsecond at 4.3 TB/s."""
    write(tmp_path, "dflash", 16, 100 * MB, {1: 5.0, 32: 10.0})
    write(tmp_path, "dflash2", 16, 530 * MB, {1: 5.29, 32: 10.51})
    write(tmp_path, "eagle3", 4, 0, {1: 6.5, 32: 20.0})
    one, many, eagle3 = script.bars(tmp_path, "h200")
    assert one.extra_bytes == 430 * MB and one.most_ms == pytest.approx(5.2 + 0.1)
    assert many.most_ms == pytest.approx(10.4 + 0.1)
    assert str(one).endswith("kept") and str(many).endswith("MISSED")
    assert "430.0 MB more" in str(one)
    assert (eagle3.kind, eagle3.slots, eagle3.most_ms) == ("eagle3", 1, 6.6)


def test_the_command_fails_unless_every_bar_is_kept(script, monkeypatch, tmp_path, capsys):
    def code() -> object:
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--device", "h200"])
        with pytest.raises(SystemExit) as end:
            script.main()
        return end.value.code

    assert code() == 1 and "no two files" in capsys.readouterr().out
    write(tmp_path, "dflash", 8, MB, {1: 5.0})
    write(tmp_path, "dspark", 8, MB, {1: 5.2})
    assert code() == 0
    write(tmp_path, "dspark", 8, MB, {1: 5.3})
    assert code() == 1 and "MISSED" in capsys.readouterr().out
