"""The least time that a step can take: the bytes that it must read, over the memory bandwidth."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.engine.setup.timing import seconds_per_call
from jaxspec.engine.step.io import Models
from jaxspec.models.parameters import num_bytes
from jaxspec.models.sharding import on_one_device
from jaxspec.proposers.device import Params

COPY_BYTES = {"cpu": 2**26}
COPY_BYTES_ACCELERATOR = 2**30
COPIES_IN_A_ROW, ROUNDS = 8, 3


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """The bytes that a decode step has to read at least, by phase."""

    verify: int
    """The target's layers, norms and head."""
    draft: int
    """The drafter's layers and norms, and the head again; 0 without a drafter."""
    target_position: int
    """Keys and values of one position in the target's cache."""
    draft_position: int
    """Keys and values of one position in the drafter's cache."""

    def of_step(self, batch: int, context: float) -> float:
        """Bytes of a step of `batch` requests with `context` positions each."""
        caches = batch * context * (self.target_position + self.draft_position)
        return self.verify + self.draft + caches


def step_bytes(models: Models, params: Params) -> StepBytes:
    """The least bytes of a step of these models; of one device, if they are spread over several."""
    params = on_one_device(params)
    target = _bytes_by_path(params["target"])
    head = target.get("head/kernel") or target["embedding/embedding"]
    tied = "head/kernel" not in target
    return StepBytes(
        verify=_without_embedding(target) + (head if tied else 0),
        draft=sum(proposer.bytes_read(params, head) for proposer in models.proposers),
        target_position=_bytes_per_position(models.target.new_cache),
        draft_position=sum(
            _bytes_per_position(partial(proposer.new_state, positions=1))
            for proposer in models.proposers
        ),
    )


def _bytes_per_position(new_cache: Callable[..., Any]) -> int:
    """Bytes by which a cache grows with a page of one position."""
    sizes = (
        num_bytes(jax.eval_shape(partial(new_cache, num_slots=1, num_pages=pages, page_size=1)))
        for pages in (2, 1)
    )
    return next(sizes) - next(sizes)


def _bytes_by_path(params: Params) -> dict[str, int]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): num_bytes(leaf) for path, leaf in leaves}


def _without_embedding(sizes: dict[str, int]) -> int:
    return sum(size for path, size in sizes.items() if not path.startswith("embedding/"))


def copy_bytes_per_second() -> float:
    """Bytes read plus bytes written by large copies on this device, in the best of some rounds."""
    size = COPY_BYTES.get(jax.default_backend(), COPY_BYTES_ACCELERATOR)
    source = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * source.nbytes / min(seconds_per_call(lambda: copy(source), COPIES_IN_A_ROW, ROUNDS))
