"""docs/limits.md says what the code refuses, no less and no more."""

import pathlib
import re

import pytest

from jaxspec.checkpoint.draft_refusals import ONLY_AS, VARIANTS
from jaxspec.engine.plan.conflicts import CONFLICTS
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.errors import UsageError

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "limits.md").read_text()
BOTH = {
    ("adaptive", "exact"): dict(adaptive=True, exact=True),
    ("synthetic_acceptance", "driver lockstep"): dict(synthetic_acceptance=3, driver="lockstep"),
}


def table_after(heading: str) -> list[tuple[str, ...]]:
    """Rows of the first table below a line that starts like this, its head left out."""
    lines = TEXT[TEXT.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append(tuple(cell.strip(" `") for cell in line.strip("|").split("|")))
    return table


def test_conflicts_are_the_code_s():
    assert table_after("## What does not go together") == [
        (conflict.one, conflict.other, conflict.why) for conflict in CONFLICTS
    ]


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.one)
def test_a_conflict_is_refused(conflict):
    with pytest.raises(UsageError, match=re.escape(f"{conflict.one} and {conflict.other}")):
        EngineOptions(**BOTH[conflict.one, conflict.other])


def test_values_of_a_plain_drafter_are_the_code_s():
    written = {key: str(value).lower() for key, value in ONLY_AS.items()}
    assert dict(table_after("A drafter is read if")) == written


def test_variants_of_dflash_are_named():
    for variant in VARIANTS:
        assert variant.name in TEXT
