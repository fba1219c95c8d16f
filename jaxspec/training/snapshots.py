"""Training states on disk: whole or not at all, the last good one always kept."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxspec.errors import LoadError, one_line
from jaxspec.training.optimization import TrainState


class NoSnapshots:
    """For runs that nobody can resume."""

    latest: int | None = None

    def save(self, state: TrainState) -> None:
        """Keeps nothing."""

    def close(self) -> None:
        """Has nothing open."""


class Snapshots:
    """The two newest states of a run, in `folder`."""

    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,  # what a kill or a full disk left takes room
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self.folder = folder

    @property
    def latest(self) -> int | None:
        """Steps done in the newest whole state."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Orbax writes aside and renames: a full disk or a kill leaves the older state alone."""
        step = int(state.step)
        if self.latest == step:
            return
        try:
            with _without_logs():
                self._manager.save(step, args=ocp.args.StandardSave(_tree(state)))
        except Exception as error:  # Orbax and TensorStore raise many kinds for one full disk
            kept = "none before it" if self.latest is None else f"that of step {self.latest} is"
            raise LoadError(
                f"cannot write the checkpoint of step {step} to {self.folder} "
                f"({one_line(error)[:200]}); {kept} kept: free some space and run this again"
            ) from error

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, laid out as `like` is."""
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _tree(like)
        )
        tree = self._manager.restore(self.latest, args=ocp.args.StandardRestore(abstract))
        return TrainState(**tree)

    def close(self) -> None:
        self._manager.close()


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Orbax logs three tracebacks for a full disk, and then raises what we say in one line."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
