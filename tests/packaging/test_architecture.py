"""docs/architecture.md draws what the code draws, and maps every room."""

import pathlib

from jaxspec.engine.step import state

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_of_a_slot_is_the_record_s():
    assert state.__doc__ is not None
    lines = [line.strip() for line in state.__doc__.splitlines()]
    start, end = (
        next(i for i, line in enumerate(lines) if line.startswith(first))
        for first in ("position ", "Invariants")
    )
    picture = [line for line in lines[start:end] if line]
    assert len(picture) == 7
    assert "\n".join(picture) in TEXT


def test_every_room_is_on_the_map():
    start = TEXT.index("jaxspec/\n")
    rooms = [line.split()[0] for line in TEXT[start : TEXT.index("```", start)].splitlines()]
    folders = {
        f"{package.name}/"
        for parent in (ROOT / "jaxspec", ROOT / "jaxspec" / "engine")
        for package in parent.iterdir()
        if (package / "__init__.py").is_file()
    }
    assert folders <= set(rooms)
