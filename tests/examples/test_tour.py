"""examples/tour.ipynb runs from top to bottom, and its stored outputs are of these cells."""

import ast
import base64
import json

import matplotlib
import pytest
from example_module import ROOT, example

run_notebook = example("run_notebook", "scripts")

PATH = ROOT / "examples" / "tour.ipynb"
STORED = json.loads(PATH.read_text())
CELLS = [cell for cell in STORED["cells"] if cell["cell_type"] == "code"]
AGAIN = "run python scripts/run_notebook.py examples/tour.ipynb"


@pytest.mark.slow
def test_it_runs():
    """The cells contain assertions of their own: equal tokens, equal acceptance."""
    matplotlib.use("Agg")
    ran = run_notebook.run(STORED)
    cells = [cell for cell in ran["cells"] if cell["cell_type"] == "code"]
    for now, stored in zip(cells, CELLS, strict=True):
        assert now["source"] == stored["source"]
        kinds = [[one["output_type"] for one in cell["outputs"]] for cell in (now, stored)]
        assert kinds[0] == kinds[1], AGAIN
    assert ran["metadata"] == STORED["metadata"]


def test_the_outputs_are_of_these_cells_and_this_demo_pair():
    assert STORED["metadata"][run_notebook.RAN] == run_notebook.hash_of(STORED), AGAIN
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))


def test_it_has_a_picture_and_is_small():
    data = [one["data"] for cell in CELLS for one in cell["outputs"] if "data" in one]
    pictures = [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]
    assert pictures and all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert PATH.stat().st_size < 300_000


def test_it_names_no_place_on_a_machine():
    assert not any(f"/{place}/" in PATH.read_text() for place in ("root", "home", "tmp", "work"))


def notebook(*sources: str) -> dict:
    cells = [{"cell_type": "code", "source": text.splitlines(True)} for text in sources]
    return {"cells": cells, "metadata": {}}


def outputs_of(*sources: str) -> list[list[dict]]:
    return [cell["outputs"] for cell in run_notebook.run(notebook(*sources))["cells"]]


def test_the_runner_stores_what_is_printed_and_returned():
    first, second, third = outputs_of("print('a\\nb')\nx = 1", "x + 1", "None")
    assert [(one["name"], one["text"]) for one in first] == [("stdout", ["a\n", "b\n"])]
    assert [one["data"]["text/plain"] for one in second] == [["2"]]
    assert second[0]["execution_count"] == 2 and third == []


def test_the_runner_does_not_hide_an_error():
    with pytest.raises(ZeroDivisionError):
        run_notebook.run(notebook("1 / 0"))


def test_a_changed_cell_changes_the_hash():
    assert run_notebook.hash_of(notebook("1")) != run_notebook.hash_of(notebook("2"))
    assert ast.parse("".join(CELLS[0]["source"]))
