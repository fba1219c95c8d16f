"""`jaxspec generate` on a model folder without tokenizer files."""

import json
import pathlib
import shutil

import pytest

from jaxspec import generate

PAIR = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "a"


@pytest.fixture
def model(tmp_path) -> list[str]:
    folder = tmp_path / "target"
    shutil.copytree(PAIR / "target", folder, ignore=shutil.ignore_patterns("tokenizer*"))
    sizes = ["--max-tokens", "3", "--max-model-len", "32", "--page-size", "16", "--ignore-eos"]
    return ["--model", str(folder), *sizes]


def test_ids_are_continued(model, capsys):
    assert generate.main([*model, "--prompt-ids", "5,6", "--json", "-", "-q"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert len(output["token_ids"]) == 3 and output["text"] == ""


def test_text_is_refused_in_a_line(model, capsys):
    assert generate.main([*model, "--prompt", "import os"]) == 2
    [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
    assert "no tokenizer.json; give --prompt-ids" in line
