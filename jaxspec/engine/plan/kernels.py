"""Which kernels the models of an engine run on, by the options `kernels` and `exchange`, and what
these refuse."""

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import jax

from jaxspec.engine.plan.options import EngineOptions, Kernels
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.layers.exchange import Exchange
from jaxspec.layers.sums import PSUM_ASKED_FOR, TOO_MANY_FOR_INBOXES
from jaxspec.models.kernels import (
    KernelUse,
    RunsOnKernels,
    StepSize,
    kernels_line,
    uses_of,
)
from pallas_kernels import NotForThisKernel, dispatch
from pallas_kernels.dense_chain import MORE_ROUNDED_TOKENS, MORE_TOKENS
from pallas_kernels.dispatch import (
    EXPECTED_GPU,
    PORTABLE_ASKED_FOR,
    XLA_ASKED_FOR,
    refusal_to_run,
)

log = logging.getLogger("jaxspec")


def refuse_device(options: EngineOptions) -> None:
    """Refuses kernels on a device that cannot run them, before any weights are read."""
    for option, others in (("kernels", "'auto' or 'xla'"), ("exchange", "'auto' or 'psum'")):
        named = getattr(options, option)
        if named in EXPECTED_GPU and (reason := refusal_to_run(named)):
            raise UsageError(f"{option} is {named!r}, but {reason}, or {option} {others}")
    if options.exchange in ("mosaic", "xla") and jax.process_count() > 1:
        raise UsageError(
            f"exchange is {options.exchange!r}, but {jax.process_count()} processes run together; "
            "expected auto or psum, or one process"
        )


def exchange_of(options: EngineOptions) -> Exchange:
    """What adds up over several devices: XLA if no kernels for Hopper GPUs are wanted, unless one
    is named."""
    none = options.exchange == "auto" and options.kernels in ("portable", "xla")
    return "psum" if none else options.exchange


def with_kernels(models: Models, kernels: Kernels) -> Models:
    """The models with this implementation of every op; "auto" leaves them as they were made."""
    if kernels == "auto":
        return models
    target = _with_kernels("target", models.target, kernels)
    proposers = tuple(
        one.with_kernels(kernels) if isinstance(one, RunsOnKernels) else one
        for one in models.proposers
    )
    return dataclasses.replace(models, target=target, proposers=proposers)


def _with_kernels(name: str, model: Any, kernels: Kernels) -> Any:
    if not isinstance(model, RunsOnKernels):
        raise UsageError(
            f"kernels is {kernels!r}, but the {name} {type(model).__name__} has layers of its own; "
            "expected kernels 'auto'"
        )
    return model.with_kernels(kernels)


def kernel_uses(models: Models, plan: Plan) -> tuple[KernelUse, ...]:
    """What runs each op of each model, in steps of every size that the plan has programs for."""
    of_target = tuple(dict.fromkeys(_sizes(plan)))
    whole = (dataclasses.replace(size, num_packed=None) for size in of_target)
    of_drafter = tuple(dict.fromkeys(whole))  # which reads no packed tokens
    named = [
        ("target", models.target, of_target),
        *(("drafter", one, of_drafter) for one in models.proposers),
    ]
    return tuple(
        use
        for name, model, sizes in named
        if isinstance(model, RunsOnKernels)
        for use in uses_of(name, model, sizes, plan.page_size)
    )


def _sizes(plan: Plan) -> Iterator[StepSize]:
    for programs in plan.every_decode(draws=False):
        num_packed = None if programs.drafting is None else programs.drafting.num_tokens
        if num_packed is not None:
            num_packed += programs.beside
        rows = programs.batch + programs.beside // programs.width
        yield StepSize(rows, programs.width, num_packed)
    yield from (StepSize(*shape) for shape in plan.shapes.prefill_shapes)


def refuse_what_kernels_cannot(models: Models, plan: Plan, options: EngineOptions) -> None:
    """Refuses models and sizes that the kernels that were named cannot run."""
    refuse_device(options)
    if options.exchange == "mosaic" and models.shards.count > 1:
        without_others = with_kernels(models, "xla")  # of which none then refuses anything
        _refuse(
            without_others, plan, "exchange is 'mosaic'", "exchange 'psum' would leave it to XLA"
        )
    if options.kernels in EXPECTED_GPU:
        asked = f"kernels is {options.kernels!r}"
        _refuse(models, plan, asked, "kernels 'auto' would run it on XLA")


def _refuse(models: Models, plan: Plan, asked: str, advice: str) -> None:
    try:
        kernel_uses(models, plan)
    except NotForThisKernel as refusal:
        raise UsageError(f"{asked}, but {refusal}; {advice}") from refusal


def log_kernels(uses: tuple[KernelUse, ...]) -> None:
    """Logs one line per engine, as a warning if a GPU runs an op without a kernel although one was
    wanted."""
    log.log(logging.WARNING if lost_kernels(uses) else logging.INFO, "%s", kernels_line(uses))


def lost_kernels(uses: tuple[KernelUse, ...]) -> bool:
    if dispatch.default_device().platform != "gpu":
        return False
    more_tokens = (MORE_TOKENS, MORE_ROUNDED_TOKENS, TOO_MANY_FOR_INBOXES)
    as_wanted = (None, XLA_ASKED_FOR, PORTABLE_ASKED_FOR, PSUM_ASKED_FOR, *more_tokens)
    return any(use.reason not in as_wanted for use in uses)
