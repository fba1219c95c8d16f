"""Flags of a command that several processes run together, each with devices of its own."""

import dataclasses
import os

from jaxspec.console.flags import flag_of
from jaxspec.errors import UsageError

FROM_ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
DEAD_AFTER_S = 30
"""Seconds without a sign of life after which a process counts as dead and the others end."""


@dataclasses.dataclass(frozen=True)
class Together:
    """Which process this is, of how many that run one engine."""

    coordinator: str | None = None
    """Where the first of several processes waits for the others, by default
    $JAX_COORDINATOR_ADDRESS."""
    num_processes: int | None = None
    """How many processes run this command together, by default $JAX_NUM_PROCESSES."""
    process_id: int | None = None
    """Which of them this one is, from 0, by default $JAX_PROCESS_ID. Only the first one prints."""


def completed(flags: Together) -> Together:
    """The flags, with missing ones taken from environment variables. Refuses them if one is still
    missing or if they do not fit together."""
    found = {
        name: os.environ.get(variable) if getattr(flags, name) is None else getattr(flags, name)
        for name, variable in FROM_ENVIRONMENT.items()
    }
    if found["num_processes"] is None and found["process_id"] is None:
        if flags.coordinator is not None:
            raise UsageError("--coordinator needs --num-processes and --process-id")
        return Together()
    for name, value in found.items():
        if value is None:
            variable = FROM_ENVIRONMENT[name]
            raise UsageError(
                f"several processes need {flag_of(name)}, or {variable} in the environment"
            )
    count, which = (_number(name, found[name]) for name in ("num_processes", "process_id"))
    if count < 1:
        raise UsageError(f"--num-processes is {count}; expected at least 1")
    if not 0 <= which < count:
        raise UsageError(f"--process-id is {which}; expected 0 to {count - 1}")
    return Together(found["coordinator"], count, which)


def _number(name: str, value: int | str | None) -> int:
    assert value is not None, "what is missing was refused"
    try:
        return int(value)
    except ValueError:
        found = f"{FROM_ENVIRONMENT[name]} is {value!r}"
        raise UsageError(f"{found}; expected an integer") from None


def join(together: Together) -> bool:
    """Waits for the other processes, if there are any. Returns whether this one prints."""
    if together.coordinator is None:
        return True
    from jaxspec.engine.setup.processes import join_processes

    assert together.num_processes is not None and together.process_id is not None
    which = together.num_processes, together.process_id
    join_processes(together.coordinator, *which, dead_after=DEAD_AFTER_S)
    return together.process_id == 0
