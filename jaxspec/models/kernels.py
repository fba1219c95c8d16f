"""Which kernels a model runs on, as it tells the engine."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from jaxspec.layers.kernels import OpChoice
from jaxspec.layers.sums import OP
from pallas_kernels.dispatch import Choice, Implementation, untimed_gpu


@dataclasses.dataclass(frozen=True)
class KernelUse:
    """Which implementation runs one op of one model, in steps of these sizes."""

    model: str
    """target or drafter."""
    op: str
    """The name of the op in `pallas_kernels`."""
    runs_on: str
    """mosaic, portable or xla; psum for sums over GPUs by XLA's collective."""
    reason: str | None
    """Why no kernel runs it; None if one does."""
    sizes: tuple[tuple[int, int], ...]
    """The steps' sizes: (batch, tokens per request). Packed tokens are requests of one token each.
    """


@runtime_checkable
class RunsOnKernels(Protocol):
    """A model, or a proposer with a model, whose layers can run on kernels."""

    def with_kernels[Itself](self: Itself, implementation: Implementation) -> Itself:
        """The same model, all of whose ops use this implementation."""
        ...

    def kernel_choices(self, batch: int, width: int, page_size: int) -> Iterable[OpChoice]:
        """The ops of a step in which the target reads `width` tokens per request, each with the
        implementation that runs it. A target that takes packed tokens has an argument `num_packed`
        for their number."""
        ...


@dataclasses.dataclass(frozen=True)
class StepSize:
    """How many tokens a model reads in a step."""

    batch: int
    width: int
    """Tokens per request."""
    num_packed: int | None = None
    """Tokens of all requests together if the model gets them packed."""


def uses_of(
    name: str, model: RunsOnKernels, sizes: Sequence[StepSize], page_size: int
) -> Iterator[KernelUse]:
    """The choices of a model for steps of these sizes; equal choices are joined."""
    found: dict[tuple[str, Choice], dict[tuple[int, int], None]] = {}
    for size in sizes:
        packed = {} if size.num_packed is None else {"num_packed": size.num_packed}
        shown = (size.batch, size.width) if size.num_packed is None else (size.num_packed, 1)
        for choice in model.kernel_choices(size.batch, size.width, page_size, **packed):
            found.setdefault(choice, {})[shown] = None
    for (op, choice), of_choice in found.items():
        yield KernelUse(name, op, choice.implementation, choice.reason, tuple(of_choice))


def kernels_line(uses: Sequence[KernelUse]) -> str:
    """The uses as one line, for example `kernels: paged_attention mosaic, add_norm xla (why)`."""
    untimed = untimed_gpu()
    return _line(uses) + (f"; nothing has been timed on {untimed}" if untimed else "")


def _line(uses: Sequence[KernelUse]) -> str:
    if not uses:
        return "kernels: none, the models have layers of their own"
    of_sums = [use for use in uses if use.op == OP]
    reasons = {use.reason for use in uses if use.op != OP}
    if len(reasons) == 1 and None not in reasons:
        but_sums = f", but {_of_op(OP, of_sums)}" if of_sums else ""
        return f"kernels: xla for every op ({reasons.pop()}){but_sums}"
    ops = dict.fromkeys(use.op for use in uses)
    return f"kernels: {', '.join(_of_op(op, [use for use in uses if use.op == op]) for op in ops)}"


def _of_op(op: str, uses: Sequence[KernelUse]) -> str:
    kernels = sorted({use.runs_on for use in uses if use.reason is None})
    without = sorted({use.runs_on for use in uses if use.reason is not None}, reverse=True)
    models = {use.model for use in uses}
    reasoned = [_with_reasons([u for u in uses if u.runs_on == one], models) for one in without]
    return f"{op} {' and '.join([*kernels, *reasoned])}"


def _with_reasons(uses: Sequence[KernelUse], models: set[str]) -> str:
    """The implementation that runs an op instead of a kernel, and why. The model is named unless
    all models use that implementation."""
    reasons = dict.fromkeys((use.model, use.reason) for use in uses)
    everywhere = {model for model, _ in reasons} == models
    said = dict.fromkeys(why if everywhere else f"{model}: {why}" for model, why in reasons)
    return f"{uses[0].runs_on} ({'; '.join(map(str, said))})"
