"""The least time a step can take: the bytes it has to read, over the memory's bandwidth."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxspec.engine.setup.memory import bytes_per_page
from jaxspec.engine.step.io import Models, Params

COPY_BYTES = {"cpu": 2**26}
COPY_BYTES_ACCELERATOR = 2**30
COPIES_IN_A_ROW = 8


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """What one decode step reads at least, by phase."""

    verify: int
    """The target's layers, norms and head."""
    draft: int
    """The drafter's, and the head again; 0 without a drafter."""
    target_row: int
    """Keys and values of one position in the target's pool."""
    draft_row: int
    """The same in the drafter's pool."""

    def of_step(self, rows: int, context: float) -> float:
        """With so many slots, each with so many positions behind it."""
        return self.verify + self.draft + rows * context * (self.target_row + self.draft_row)


def step_bytes(models: Models, params: Params) -> StepBytes:
    target = _leaves(params["target"])
    tied = models.target.config.tie_word_embeddings
    head = target["embedding/embedding" if tied else "head/kernel"]
    verify = sum(size for path, size in target.items() if not path.startswith("embedding/"))
    verify += head if tied else 0
    target_row = bytes_per_page(Models(models.target, None), 1)
    if models.drafter is None:
        return StepBytes(verify, 0, target_row, 0)
    drafter = _leaves(params["drafter"])
    draft = sum(size for path, size in drafter.items() if not path.startswith("embedding/"))
    draft += 0 if models.drafter.config.owns_head else head
    return StepBytes(verify, draft, target_row, bytes_per_page(models, 1) - target_row)


def _leaves(tree: dict[str, Any]) -> dict[str, int]:
    return {path: leaf.nbytes for path, leaf in flatten_dict(tree, sep="/").items()}


def copy_bytes_per_second(rounds: int = 3) -> float:
    """Bytes read plus bytes written by large copies on this device, at their best; several in a
    row, so that launching one and waiting for it hardly count."""
    size = COPY_BYTES.get(jax.default_backend(), COPY_BYTES_ACCELERATOR)
    source = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copy(source).block_until_ready()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(COPIES_IN_A_ROW):
            last = copy(source)
        last.block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * source.nbytes * COPIES_IN_A_ROW / min(times)
