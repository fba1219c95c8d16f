"""What the profiling flags ask for, around whatever a command lets its engine do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.engine.engine import Engine
from jaxspec.trace.options import Profiling
from jaxspec.trace.recording import dump_programs, recording


@contextmanager
def profiled(
    engine: Engine,
    asked: Profiling,
    about: dict[str, Any],
    draws: bool,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Writes the programs, then records what the engine does inside; each if it was asked for."""
    if asked.dump_programs:
        programs = dump_programs(engine, asked.dump_programs, draws)
        say(f"programs: {len(programs)} in {asked.dump_programs}, sizes in memory.json")
    if not asked.profile_dir:
        yield
        return
    with recording(engine, asked.profile_dir, asked.profile_skip, asked.profile_steps, about):
        yield
    say(f"profile: python -m jaxspec.profile {asked.profile_dir}")
