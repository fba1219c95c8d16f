"""The memory of each device of an engine into which the other devices write."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxspec.cache.cache import Cache
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.state import EngineState
from jaxspec.layers.sums import choice_of_sums, room_for
from jaxspec.models.sharding import mesh_of
from jaxspec.models.targets import CheckpointTarget
from jaxspec.proposers.drafters import drafter_in
from pallas_kernels.exchange import Memory, inboxes_of, make_memory


@dataclasses.dataclass(frozen=True)
class WithInboxes:
    """Makes empty states with inboxes, for the target and each proposer whose state is a cache."""

    empty: Callable[[], EngineState]
    """Makes states without."""
    models: Models
    kept: list[Memory] = dataclasses.field(default_factory=list)
    """All inboxes of these states, which must stay: a program may still run that knows where they
    are."""

    def __call__(self) -> EngineState:
        state = self.empty()
        proposers = tuple(self.given(x) if isinstance(x, Cache) else x for x in state.proposers)
        return dataclasses.replace(state, cache=self.given(state.cache), proposers=proposers)

    def given(self, cache: Cache) -> Cache:
        """The cache with inboxes of its own."""
        memory = make_memory(mesh_of(self.models.shards.count), self.room)
        self.kept.append(memory)
        return dataclasses.replace(cache, inboxes=inboxes_of(memory))

    @property
    def room(self) -> int:
        """Size in bytes of the largest message that a model sends."""
        return max(room_for(one.config.decoder, one.dtype) for one in models_of(self.models))


def with_inboxes(empty: Callable[[], EngineState], models: Models) -> Callable[[], EngineState]:
    """The function that makes empty states, whose states have inboxes if the models use any."""
    return WithInboxes(empty, models) if exchange_by_inboxes(models) else empty


def exchange_by_inboxes(models: Models) -> bool:
    """Whether some model adds up by inboxes, in steps of few tokens."""
    if models.shards.count == 1:
        return False
    choices = (choice_of_sums(one.config.decoder, one.dtype, 1) for one in models_of(models))
    return any(choice.implementation != "psum" for choice in choices)


def models_of(models: Models) -> list[Any]:
    """The target, and the drafter if there is one."""
    target, drafter = models.target, drafter_in(models.proposers)
    assert isinstance(target, CheckpointTarget), "only such targets are cut into shards"
    return [target] if drafter is None else [target, drafter]
