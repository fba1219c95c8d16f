"""The least time a step can take: the bytes it has to read, over the memory's bandwidth."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.engine.setup.memory import bytes_per_page
from jaxspec.engine.setup.timing import seconds_per_call
from jaxspec.engine.step.io import Models, Params

COPY_BYTES = {"cpu": 2**26}
COPY_BYTES_ACCELERATOR = 2**30
COPIES_IN_A_ROW, ROUNDS = 8, 3


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """What one decode step reads at least, by phase."""

    verify: int
    """The target's layers, norms and head."""
    draft: int
    """The drafter's layers and norms, and the head again; 0 without a drafter."""
    target_position: int
    """Keys and values of one position in the target's cache."""
    draft_position: int
    """The same in the drafter's cache."""

    def of_step(self, batch: int, context: float) -> float:
        """Bytes of a step of `batch` requests with `context` positions each."""
        caches = batch * context * (self.target_position + self.draft_position)
        return self.verify + self.draft + caches


def step_bytes(models: Models, params: Params) -> StepBytes:
    target = _bytes_by_path(params["target"])
    tied = models.target.config.tie_word_embeddings
    head = target["embedding/embedding" if tied else "head/kernel"]
    verify = _without_embedding(target) + (head if tied else 0)
    target_position = bytes_per_page(Models(models.target, None), 1)
    if models.drafter is None:
        return StepBytes(verify, 0, target_position, 0)
    draft = _without_embedding(_bytes_by_path(params["drafter"]))
    draft += 0 if models.drafter.config.owns_head else head
    draft_position = bytes_per_page(models, 1) - target_position
    return StepBytes(verify, draft, target_position, draft_position)


def _bytes_by_path(params: Params) -> dict[str, int]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): leaf.nbytes for path, leaf in leaves}


def _without_embedding(sizes: dict[str, int]) -> int:
    return sum(size for path, size in sizes.items() if not path.startswith("embedding/"))


def copy_bytes_per_second() -> float:
    """Bytes read plus bytes written by large copies on this device, in the best of some rounds."""
    size = COPY_BYTES.get(jax.default_backend(), COPY_BYTES_ACCELERATOR)
    source = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * source.nbytes / min(seconds_per_call(lambda: copy(source), COPIES_IN_A_ROW, ROUNDS))
