"""A user's mistake is one line and an exit code in scripts too."""

import pathlib
import runpy
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
MISTAKES = [
    ("compare_draft_sampling", ["--target", "./NONE", "--draft", "./NONE"], 1, "no such folder"),
    ("pretrain_target", ["--text", "MISSING", "--out", "OUT"], 1, "no file or folder"),
    ("plot_bench", ["MISSING", "--out", "OUT"], 1, "cannot be read"),
    ("plot_bench", ["EMPTY", "--out", "OUT"], 1, "jaxspec.bench --json"),
    ("trim_trace", ["MISSING", "OUT"], 1, "no trace in"),
    ("bench_steps", ["--model", "tiny", "--anchors", "EMPTY"], 2, "expected an object with rows"),
    ("bench_spans", ["--phases", "4y5"], 2, "--phases: invalid"),
    ("check_exact", ["--prompts", "0"], 2, "--prompts: invalid positive"),
]


def run(script: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Its exit code."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [script, *given])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    return exit.value.code


@pytest.mark.parametrize(("script", "given", "code", "said"), MISTAKES)
def test_a_mistake_is_one_line(script, given, code, said, monkeypatch, tmp_path, capsys):
    (tmp_path / "EMPTY").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert run(script, given, monkeypatch) == code
    out, err = capsys.readouterr()
    assert not out
    assert "error: " in err.splitlines()[-1] and said in err.splitlines()[-1]
    assert not (tmp_path / "OUT").exists()
