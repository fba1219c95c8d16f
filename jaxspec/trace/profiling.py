"""The profiling flags of a command, applied while it runs its engine."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.engine.engine import Engine
from jaxspec.trace.programs import dump_programs
from jaxspec.trace.recording import recording


@dataclasses.dataclass(frozen=True)
class Profiling:
    """Fields have the names of the flags."""

    profile_steps: int
    """Steps to record."""
    profile_skip: int
    """Steps before those, so that compiling is over."""
    profile_dir: str | None = None
    """Folder of the trace; None records nothing."""
    dump_programs: str | None = None
    """Folder of the programs' texts and sizes; None writes none."""


@contextmanager
def profiled(
    engine: Engine,
    flags: Profiling,
    about: dict[str, Any],
    draws: bool,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Writes the programs, then records what the engine does inside; each if its flag is set."""
    if flags.dump_programs:
        programs = dump_programs(engine, flags.dump_programs, draws)
        say(f"programs: {len(programs)} in {flags.dump_programs}, sizes in memory.json")
    if not flags.profile_dir:
        yield
        return
    with recording(engine, flags.profile_dir, flags.profile_skip, flags.profile_steps, about):
        yield
    say(f"profile: python -m jaxspec.profile {flags.profile_dir}")
