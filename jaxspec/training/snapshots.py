"""Training states on disk. Each is written whole or not at all, and the last good one is kept."""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxspec.errors import LoadError, one_line
from jaxspec.models.parameters import num_bytes
from jaxspec.training.checksums import damaged_file, save_checksums
from jaxspec.training.health import all_finite, check_state
from jaxspec.training.notices import notice
from jaxspec.training.quiet_orbax import quiet_orbax
from jaxspec.training.train_step import TrainState


class NoSnapshots:
    """For runs that cannot be resumed: keeps nothing."""

    def latest_or(self, first: TrainState) -> TrainState:
        return first

    def save(self, state: TrainState) -> None:
        """Keeps nothing, but refuses a state that is not finite as `Snapshots` does."""
        check_state(int(state.step), state)

    def due(self) -> bool:
        return False

    def close(self) -> None:
        """Has nothing open."""


class Damaged(Exception):
    """A state cannot be used; the message says why."""


class Snapshots:
    """Keeps the two newest states of a run in `folder`, saved every `minutes` minutes."""

    def __init__(self, folder: Path, minutes: float = 0.0) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,  # a kill or a full disk leaves incomplete files behind
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self.folder = folder
        self._seconds, self._saved = 60 * minutes, time.monotonic()

    @property
    def latest(self) -> int | None:
        """Number of steps done in the newest complete state; None if there is no state."""
        return self._manager.latest_step()

    def due(self) -> bool:
        """Whether it is time to save a state."""
        return time.monotonic() - self._saved >= self._seconds

    def save(self, state: TrainState) -> None:
        """Writes the state, unless it is kept already. A state that is not finite is refused.

        Orbax writes beside the older states and renames at the end, so that neither a full disk
        nor a kill can damage them.
        """
        step = int(state.step)
        if self.latest == step:
            return
        check_state(step, state)
        try:
            check_room(self.folder, num_bytes(state))
            with quiet_orbax():
                self._manager.save(step, args=ocp.args.StandardSave(_tree(state)))
            save_checksums(self._path(step))
        except Exception as error:  # Orbax and TensorStore raise many kinds for one full disk
            kept = "none before it is" if self.latest is None else f"that of step {self.latest} is"
            raise LoadError(
                f"cannot write the checkpoint of step {step} to {self.folder} "
                f"({one_line(error)[:200]}); {kept} kept: free some space and run this again"
            ) from error
        self._saved = time.monotonic()

    def latest_or(self, first: TrainState) -> TrainState:
        """The newest good state, with the shapes and shardings of `first`; `first` if none is kept.

        Newer states that are damaged are moved aside, and one line says so.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                state = self._restored(step, first)
            except Damaged as error:
                damaged[step] = str(error)
                continue
            self._move_aside(damaged, step)
            return state
        if damaged:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise LoadError(
                f"no state in {self.folder} can be read ({reasons}); remove that folder to train "
                "from the first step on, or give another --out"
            )
        return first

    def close(self) -> None:
        self._manager.close()

    def _path(self, step: int) -> Path:
        return self.folder / str(step)

    def _restored(self, step: int, first: TrainState) -> TrainState:
        """The state of a step, or Damaged. Running out of memory is not damage."""
        name = damaged_file(self._path(step))
        if name is not None:
            raise Damaged(f"{name} is not as it was written")
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _tree(first)
        )
        try:
            with quiet_orbax():
                tree = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax and TensorStore raise a dozen kinds for damage
            raise Damaged(one_line(error)[:100]) from error
        state = TrainState(**tree)
        if int(state.step) != step or not all_finite(state):
            raise Damaged("it holds another step, or numbers that are not finite")
        return state

    def _move_aside(self, damaged: dict[int, str], good: int) -> None:
        for step, reason in damaged.items():
            aside = self.folder.with_name(f"damaged_state_{step}")
            shutil.rmtree(aside, ignore_errors=True)
            self._path(step).rename(aside)
            notice(
                f"the state of step {step} is damaged ({reason}) and was moved to {aside}; "
                f"training goes on from step {good}"
            )
        if damaged:
            self._manager.reload()


def check_room(folder: Path, needed: int) -> None:
    """Raises an OSError unless the disk has room, because that is cheaper than failing halfway."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{needed / 1e6:.1f} MB are needed, and {free / 1e6:.1f} MB are free")


def _tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
