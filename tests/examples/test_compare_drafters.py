"""examples/compare_drafters.py at its smallest: every kind is trained, measured and compared."""

import json
import re
import sys

import pytest
from example_module import ROOT, example

from jaxspec import train

sys.path.append(str(ROOT / "examples"))  # it shares functions with another example
compare_drafters = example("compare_drafters")

TARGET = ROOT / "tests" / "data" / "goldens" / "a" / "target"
DATA = "--length 32 --batch-size 2 --compute float32 --rank 4 --log-every 1"
NEW = "--block-size 4 --layers 1 --features 1 --anchors 4 --keep-features --dspark-weights 1 0 0"


@pytest.fixture
def folder(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(9):
        (text / f"file_{number}.py").write_text("one two three four five six seven\n" * 12)
    return text


@pytest.mark.slow
def test_from_text_to_a_table(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare_drafters, "DATA", DATA)
    monkeypatch.setattr(compare_drafters, "NEW", NEW)
    out = tmp_path / "out"
    flags = ["--target", str(TARGET), "--text", str(folder), "--out", str(out)]
    size = ["--steps", "2", "--max-tokens", "8", "--prompts", "2"]
    kinds = ["--kinds", "dflash", "dspark", "dflash2"]
    assert compare_drafters.main([*flags, *size, *kinds]) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"^(\w+) +\d+\.\d\dM +(\d\.\d\d) +(\d\.\d\d)$", said, re.M)
    assert [kind for kind, *_ in rows] == kinds[1:]
    assert all(1 <= float(mean) <= 4 and mean == only for _, mean, only in rows)
    assert said.endswith("the text is equal: yes\n")
    report = json.loads((out / "comparison.json").read_text())
    assert report["command"].startswith("python examples/compare_drafters.py --target ")
    assert report["environment"]["commit"]
    assert [run["kind"] for run in report["runs"]] == kinds[1:]
    assert report["runs"][0]["parameters"] < report["runs"][1]["parameters"]
    assert (out / "comparison.png").stat().st_size > 1000


@pytest.mark.parametrize("start_from", [None, "folder"])
@pytest.mark.parametrize("kind", compare_drafters.KINDS)
def test_its_flags_are_those_of_the_command(kind, start_from):
    options = compare_drafters.parser().parse_args(["--out", "c"])
    options.start_from = start_from
    given = ["--target", "a", "--data", "b", "--out", "c", "--kind", kind]
    flags = train._parser().parse_args([*given, *compare_drafters.flags_of(options)])
    assert flags.on_policy and flags.compute == "float32" and flags.rank == 64
    assert flags.keep_features == (start_from is None)
    assert flags.learn == ("all" if start_from is None else "heads")
    assert flags.layers == (None if start_from else 1)


def test_every_eighth_file_of_each_folder_is_held_out(tmp_path):
    names = [f"{number}.py" for number in range(9)]
    folders = [tmp_path / "one" / "same", tmp_path / "two" / "same"]
    for folder in folders:
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(f"{folder.parent.name} {name}")
    text, held_out = compare_drafters.divided_folders(folders, tmp_path / "text")
    assert held_out == [folder / names[number] for folder in folders for number in (0, 8)]
    learned = {file.read_text() for file in text.rglob("*.py")}
    assert learned == {f"{one} {name}" for one in ("one", "two") for name in names[1:8]}


def test_pieces_begin_at_lines_spread_over_the_files(folder):
    first, second = sorted(folder.iterdir())[:2]
    first.write_text("a\nb\n")
    second.write_text("c\nd\n")
    picture = folder / "picture.gif"
    picture.write_bytes(b"GIF89a\xff\xfe")
    pieces = compare_drafters.pieces_of([first, picture, second], 2)
    assert pieces == ["a\nb\nc\nd", "c\nd"]


def test_the_mean_of_seeds_is_in_the_table():
    runs = [
        {"kind": "dspark", "acceptance_length": length, "parameters": 2_500_000}
        for length in (2.0, 3.0)
    ]
    assert compare_drafters.table(runs, ["dspark"]).endswith("2.50M   2.50   2.00  3.00")
