"""The options of commands that record profiles."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Profiling:
    """Profiling options, with the names of the flags."""

    profile_dir: str | None = None
    """Record a trace of some steps into this folder."""
    profile_steps: int = 5
    """Steps to record."""
    profile_skip: int = 2
    """Steps that run before the recording starts, so that nothing compiles in it."""
    profile_readable: bool = False
    """Launch every kernel by itself, so that the trace has its name; slower than the real run."""
    dump_programs: str | None = None
    """Write the HLO text and the memory analysis of every step program into this folder."""
