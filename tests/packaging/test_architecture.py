"""docs/architecture.md draws what the code draws."""

import pathlib

from jaxspec.engine.step import state

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


def test_the_picture_of_a_slot_is_the_record_s():
    lines = [line.strip() for line in state.__doc__.splitlines()]
    start, end = (
        next(i for i, line in enumerate(lines) if line.startswith(first))
        for first in ("position ", "Invariants")
    )
    picture = [line for line in lines[start:end] if line]
    assert len(picture) == 7
    assert "\n".join(picture) in TEXT
