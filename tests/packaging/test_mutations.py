"""The list of mutations fits the code, and the recorded run killed all of them."""

import json
import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "mutate.py"))
MUTATIONS = SCRIPT["mutations"]()
OF_THE_AUDIT = 27


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.id)
def test_a_mutation_can_be_made(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old and mutation.breaks
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).is_file()


def test_a_mutation_is_undone(tmp_path):
    [mutation] = (one for one in MUTATIONS if one.id == "pct-max")
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    before = (ROOT / mutation.file).read_text()
    copy.write_text(before)
    with mutation.applied(tmp_path):
        assert mutation.new in copy.read_text() != before
    assert copy.read_text() == before


def test_every_mutation_was_killed_when_they_ran_last():
    report = json.loads((ROOT / "docs" / "results" / "mutations.json").read_text())
    rows = {row["id"]: row for row in report["rows"]}
    listed = [mutation.id for mutation in MUTATIONS if mutation.origin == "audit"]
    assert len(listed) == OF_THE_AUDIT and set(listed) <= rows.keys()
    assert rows.keys() <= {mutation.id for mutation in MUTATIONS}
    assert report["counts"] == {"killed": len(rows)}
    assert all(row["outcome"] == "killed" and row["failed"] for row in rows.values())
