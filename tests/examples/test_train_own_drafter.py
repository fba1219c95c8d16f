"""examples/train_own_drafter.py at its smallest: it trains, measures, and the text is equal."""

import json
import re

import pytest
from example_module import ROOT, example

from jaxspec import train

train_own_drafter = example("train_own_drafter")

TARGET = ROOT / "tests" / "data" / "goldens" / "a" / "target"
SMALLEST = (
    "--block-size 4 --layers 1 --features 1 --from-target --length 32 --anchors 4 --batch-size 2 "
    "--compute float32 --log-every 1"
)


@pytest.fixture
def folder(tmp_path):
    """Nine files of text, one that is empty, and a compiled one."""
    text = tmp_path / "text"
    (text / "__pycache__").mkdir(parents=True)
    (text / "__pycache__" / "a.pyc").write_bytes(b"\xff\x00")
    (text / "empty.py").write_text("")
    for number in range(9):
        (text / f"file_{number}.py").write_text("one two three four five six seven\n" * 12)
    return text


@pytest.mark.slow
def test_from_text_to_a_figure(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_own_drafter, "TINY", SMALLEST)
    out = tmp_path / "out"
    options = ["--target", str(TARGET), "--text", str(folder), "--out", str(out)]
    passed_on = ["--seed", "1"]
    assert train_own_drafter.main([*options, "--steps", "2", "--max-tokens", "8", *passed_on]) == 0
    said = capsys.readouterr().out
    figures = re.findall(r"drafter (?:before|after) training +(\d\.\d\d)$", said, re.M)
    assert len(figures) == 2 and all(1 <= float(figure) <= 4 for figure in figures)
    assert said.endswith("the text is equal: yes\n")
    assert (out / "zlab" / "model.safetensors").is_file()
    config = json.loads((out / "train_config.json").read_text())
    assert (config["steps"], config["seed"], config["layers"]) == (2, 1, 1)
    assert len(list((out / "text").iterdir())) == 7, "two of nine files are held out"


def test_its_flags_are_those_of_the_command():
    """Also the ones that the run above leaves out because they take long."""
    given = ["--target", "a", "--data", "b", "--out", "c", *train_own_drafter.TINY.split()]
    flags = train._parser().parse_args(given)
    assert flags.on_policy and flags.from_target and flags.compute == "float32"


def test_what_is_held_out_is_not_learned_from(folder):
    learned, held_out = train_own_drafter.divided(folder)
    assert [file.name for file in held_out] == ["file_0.py", "file_8.py"]
    assert len(learned) == 7 and not set(learned) & set(held_out)
    prompts = train_own_drafter.prompts_of(held_out)
    assert len(prompts) == 2 and all(prompt.startswith("one two") for prompt in prompts)


def test_a_folder_with_too_few_files_is_refused(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("one")
    out = str(tmp_path / "out")
    assert train_own_drafter.main(["--text", str(tmp_path), "--out", out]) == 2
    assert "has 1 files; expected at least 2" in capsys.readouterr().err
