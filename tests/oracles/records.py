"""Reads the recorded configs and outputs of the reference implementations."""

import dataclasses
import json
import pathlib

import numpy as np

from oracles import draws

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "oracles"


@dataclasses.dataclass(frozen=True)
class Record:
    """One tiny model and what the reference computed with it."""

    case: dict
    """The config in the form of config.json, and how the reference was run."""
    outputs: dict[str, np.ndarray]
    """Arrays by name, as scripts/record_oracles.py wrote them."""

    @property
    def config(self) -> dict:
        return self.case["config"]

    @property
    def prompt(self) -> np.ndarray:
        """The tokens that the reference read."""
        return draws.tokens("prompt", self.case["prompt"], self.config["vocab_size"])


def names(model: str) -> list[str]:
    """Recorded cases of a model, such as `qwen3` or `dflash`."""
    return sorted(path.stem for path in (DATA / model).glob("*.json"))


def read(model: str, name: str) -> Record:
    with np.load(DATA / model / f"{name}.npz") as outputs:
        arrays = dict(outputs)
    return Record(json.loads((DATA / model / f"{name}.json").read_text()), arrays)


def relative_error(ours: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference over the reference's largest magnitude; NaN if either has one."""
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    return float(np.abs(ours - reference).max() / np.abs(reference).max())
