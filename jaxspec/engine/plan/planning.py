"""Makes a plan from models and options. Options that cannot work are refused here."""

import dataclasses
import functools

import jax

from jaxspec.acceptance.synthetic import (
    MixedAcceptance,
    SyntheticAcceptance,
    from_length,
    from_rates,
)
from jaxspec.engine.plan.adapting import with_adaptive_widths
from jaxspec.engine.plan.beside import with_prefill_beside
from jaxspec.engine.plan.confidence import with_confidence_threshold
from jaxspec.engine.plan.exact import with_exact_target
from jaxspec.engine.plan.fp8 import with_fp8_activations
from jaxspec.engine.plan.kernels import exchange_of, refuse_what_kernels_cannot, with_kernels
from jaxspec.engine.plan.methods import choose_method
from jaxspec.engine.plan.options import DRIVERS, Acceptance, EngineOptions
from jaxspec.engine.plan.plan import Plan, Shapes, shapes_for
from jaxspec.engine.plan.shards import with_shards
from jaxspec.engine.plan.sharing import with_prefix_caching
from jaxspec.engine.plan.sizes import (
    check_block,
    check_sizes,
    context_limit,
    say_what_is_ignored,
)
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.layers.shards import Shards
from jaxspec.models.target import Target
from jaxspec.proposers.device import DeviceProposer, DraftsAnyNumber
from jaxspec.proposers.drafters import kind_of
from jaxspec.proposers.lookup import lookup_of
from jaxspec.proposers.methods import METHODS

WIDTH_WITHOUT_DRAFTER = 16


def plan_engine(models: Models, options: EngineOptions) -> tuple[Models, Plan]:
    """The models with every proposer that the engine needs, and the plan. Only the numbers of pages
    and of saved states are left open, since they depend on how much memory is free."""
    models = _with_num_drafts(with_kernels(models, options.kernels), options.num_drafts)
    if options.fp8_activations:
        models = with_fp8_activations(models)
    if options.exact:
        models = with_exact_target(models)
    plan = with_adaptive_widths(_plan(models, options), models, options)
    plan = with_prefill_beside(plan, models, options)
    shards = Shards(options.tensor_parallel_size, options.exact, exchange_of(options))
    models = with_shards(models, shards)
    if plan.drafter:
        models = with_confidence_threshold(models, options.confidence_threshold)
    refuse_what_kernels_cannot(models, plan, options)
    proposers = (*models.proposers, *_added_proposers(plan, options))
    synthetic = options.synthetic_acceptance is not None
    models = _same_models(models.target, proposers, options.page_size, synthetic)
    return models, with_prefix_caching(plan, models, options)


def _with_num_drafts(models: Models, num_drafts: int | None) -> Models:
    """The models with `num_drafts` for the proposers that can make any number of drafts."""
    if num_drafts is None:
        return models
    proposers = tuple(
        one.with_num_drafts(num_drafts) if isinstance(one, DraftsAnyNumber) else one
        for one in models.proposers
    )
    return dataclasses.replace(models, proposers=proposers)


def _plan(models: Models, options: EngineOptions) -> Plan:
    check_sizes(options)
    kind = kind_of(models.proposers[0]) if models.proposers else None
    method = choose_method(options.method, has_drafter=bool(models.proposers), kind=kind)
    uses, driver = METHODS[method], choose_driver(options)
    block_size = _block_size(models, options)
    max_model_len = context_limit(models, options.max_model_len)
    check_block(models, block_size, max_model_len)
    width = _width(method, options, block_size)
    on_device = _proposes_on_device(method, driver)
    host_drafts = uses.host is not None and not on_device
    say_what_is_ignored(options, method)
    shapes = _shapes(options, min(options.prefill_chunk, max_model_len), width)
    return Plan(
        method=method,
        driver=driver,
        exact=options.exact,
        width=width,
        block_size=block_size,
        num_slots=options.max_batch,
        max_model_len=max_model_len,
        page_size=options.page_size,
        num_pages=0,
        shapes=shapes,
        admitted_at_once=shapes.largest_prefill,
        proposer=0 if uses.drafter else len(models.proposers) if on_device else None,
        drafter=uses.drafter,
        drawn_drafts=uses.drafter and options.draft_sampling == "drawn" and not options.exact,
        host_drafts=host_drafts,
        reads_before_decoding=host_drafts or driver == "lockstep",
        prefill_budget=options.prefill_budget,
    )


def _proposes_on_device(method: str, driver: str) -> bool:
    """Whether the method's own device proposer proposes. If the method also has a host proposer,
    this pays only if the host does not have to wait for results."""
    uses = METHODS[method]
    return uses.device is not None and (driver == "overlapped" or uses.host is None)


def _added_proposers(plan: Plan, options: EngineOptions) -> tuple[DeviceProposer, ...]:
    """The method's device proposers without weights. With `exact` there always is one, so that
    every method compiles the same programs."""
    make = METHODS[plan.method].device
    if make is not None and _proposes_on_device(plan.method, plan.driver):
        return (make(options, plan.width - 1),)
    return (lookup_of(options, plan.width - 1),) if options.exact else ()


@functools.lru_cache
def _same_models(
    target: Target, proposers: tuple[DeviceProposer, ...], page_size: int, synthetic: bool
) -> Models:
    """The models, as one object for all equal arguments."""
    return Models(target, proposers, page_size, synthetic)


def _shapes(options: EngineOptions, chunk: int, width: int) -> Shapes:
    shapes = shapes_for(options.max_batch, chunk, options.exact, width)
    return Shapes(
        options.batch_sizes or shapes.batch_sizes, options.prefill_shapes or shapes.prefill_shapes
    )


def _block_size(models: Models, options: EngineOptions) -> int:
    """The size of a block. It is the same for every method, as `exact` requires."""
    if models.proposers:
        return models.proposers[0].num_drafts + 1
    return max(WIDTH_WITHOUT_DRAFTER, options.drafts_of_lookup + 1)


def _width(method: str, options: EngineOptions, block_size: int) -> int:
    uses = METHODS[method]
    if options.exact or uses.drafter:
        return _width_of_drafter(options, block_size)
    if uses.host is None and uses.device is None:
        return 1
    return min(options.drafts_of_lookup + 1, block_size)


def _width_of_drafter(options: EngineOptions, block_size: int) -> int:
    if options.width is None:
        return block_size
    if not 2 <= options.width <= block_size:
        raise UsageError(
            f"width is {options.width}; expected 2 to {block_size}, the size of a block"
        )
    return options.width


def choose_driver(options: EngineOptions) -> str:
    if options.driver not in DRIVERS:
        raise UsageError(f"driver is {options.driver!r}; expected one of {', '.join(DRIVERS)}")
    if options.driver != "auto":
        return options.driver
    on_cpu = jax.default_backend() == "cpu"
    return "lockstep" if on_cpu and options.synthetic_acceptance is None else "overlapped"


def synthetic_of(
    acceptance: Acceptance | None, num_drafts: int
) -> SyntheticAcceptance | MixedAcceptance | None:
    """What `EngineOptions.synthetic_acceptance` means for blocks with `num_drafts` drafts."""
    if acceptance is None:
        return None
    if isinstance(acceptance, int | float):
        return from_length(acceptance, num_drafts)
    kinds = [kind for kind in acceptance if isinstance(kind, tuple)]
    rates = [rate for rate in acceptance if not isinstance(rate, tuple)]
    if kinds and rates:
        raise UsageError(
            f"synthetic_acceptance is {acceptance}; expected either rates or tuples of rates"
        )
    if kinds:
        return MixedAcceptance(tuple(from_rates(kind, num_drafts) for kind in kinds))
    return from_rates(rates, num_drafts)
