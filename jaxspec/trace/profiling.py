"""The profiling flags of a command, applied while it runs its engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.engine.engine import Engine
from jaxspec.trace.options import Profiling
from jaxspec.trace.programs import dump_programs
from jaxspec.trace.recording import recording


@contextmanager
def profiled(
    engine: Engine,
    flags: Profiling,
    about: dict[str, Any],
    draws: bool,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Writes the programs and records the engine inside the `with` block, as far as flags say."""
    if flags.dump_programs:
        programs = dump_programs(engine, flags.dump_programs, draws)
        say(f"programs: {len(programs)} in {flags.dump_programs}, sizes in memory.json")
    if not flags.profile_dir:
        yield
        return
    with recording(engine, flags.profile_dir, flags.profile_skip, flags.profile_steps, about):
        yield
    say(f"profile: python -m jaxspec.profile {flags.profile_dir}")
