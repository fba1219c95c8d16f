"""Training runs of one small matrix, which compile at once, for tests of everything around them."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.training.data import Sequences
from jaxspec.training.loop import train
from jaxspec.training.recipe import Cadence, Optimization

STEPS = 6
OPTIONS = Optimization(steps=STEPS, batch_size=2, learning_rate=0.1)
EVERY_STEP = Cadence(log_every=1, checkpoint_minutes=0.0)


def objective(trainable, frozen, batch, key):
    """Pulls a matrix towards the mean of the batch."""
    loss = jnp.mean((trainable["matrix"] - jnp.mean(batch.tokens)) ** 2)
    return loss, {"loss": loss}


def sequences() -> Sequences:
    return Sequences(np.arange(24, dtype=np.int32).reshape(12, 2), np.zeros(12, np.int32))


def run_small(folder: Path, cadence=EVERY_STEP, options=OPTIONS, objective=objective):
    params = {"matrix": np.ones((2, 3), np.float32)}
    return train(objective, params, {}, sequences(), options, cadence, folder)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["gradient_norm"]) for line in lines]
