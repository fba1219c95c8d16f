"""Spreads the parameters of an engine over its devices."""

from typing import Any

import jax

from jaxspec.acceptance.synthetic import MixedAcceptance, SyntheticAcceptance
from jaxspec.engine.plan.shards import OPTION
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.layers.shards import Shards
from jaxspec.models.parameters import Touchable
from jaxspec.models.sharding import (
    Placement,
    place_of_uploads,
    placed,
    placements,
    spread_over,
)
from jaxspec.proposers.device import Params
from jaxspec.proposers.drafters import drafter_in


def places_of(models: Models) -> dict[str, dict[str, Placement]]:
    """By each model's name, where the parameters of models made `with_shards` belong. Empty for one
    device."""
    if models.shards.count == 1:
        return {}
    shards = Shards(models.shards.count)
    named = {"target": models.target, "drafter": drafter_in(models.proposers)}
    return {
        name: placements(model, shards)
        for name, model in named.items()
        if isinstance(model, Touchable)
    }


def spread_params(models: Models, params: Params) -> Params:
    """The parameters, spread over as many devices as the models are split for. Parameters that are
    spread already stay where they are."""
    _refuse_other_numbers(params, models.shards.count)
    places = places_of(models)
    return {
        name: placed(of_model, places[name]) if name in places else of_model
        for name, of_model in params.items()
    }


def with_synthetic(
    params: Params, acceptance: SyntheticAcceptance | MixedAcceptance, devices: int
) -> Params:
    """The parameters with these rates, which every device reads in each step."""
    return params | {"synthetic": jax.device_put(acceptance.rates, place_of_uploads(devices))}


def _refuse_other_numbers(params: Any, count: int) -> None:
    """Refuses parameters that were spread for another number of devices: their shards are in
    another order."""
    numbers = {spread_over(leaf) for leaf in jax.tree.leaves(params)} - {None, count}
    if numbers:
        raise UsageError(
            f"{OPTION} is {count}, but the parameters were opened for {numbers.pop()}; open them "
            f"with {OPTION}={count}"
        )
