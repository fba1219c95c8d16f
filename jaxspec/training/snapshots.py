"""Training states on disk. Each is written whole or not at all, and the last good one is kept."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxspec.errors import LoadError, one_line
from jaxspec.training.train_step import TrainState


class NoSnapshots:
    """For runs that cannot be resumed: keeps nothing."""

    def latest_or(self, first: TrainState) -> TrainState:
        return first

    def save(self, state: TrainState) -> None:
        """Keeps nothing."""

    def save_if_due(self, state: TrainState) -> None:
        """Keeps nothing."""

    def close(self) -> None:
        """Has nothing open."""


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

    def save_if_due(self, state: TrainState) -> None:
        if time.monotonic() - self._saved >= self._seconds:
            self.save(state)
            self._saved = time.monotonic()

    def save(self, state: TrainState) -> None:
        """Writes the state, unless it is kept already.

        Orbax writes beside the older states and renames at the end, so that neither a full disk
        nor a kill can damage them.
        """
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

    def latest_or(self, first: TrainState) -> TrainState:
        """The newest state, with the shapes and shardings of `first`; `first` if none is kept."""
        if self.latest is None:
            return first
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _tree(first)
        )
        tree = self._manager.restore(self.latest, args=ocp.args.StandardRestore(abstract))
        return TrainState(**tree)

    def close(self) -> None:
        self._manager.close()


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Silences Orbax, which logs three tracebacks for a full disk before it raises."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
