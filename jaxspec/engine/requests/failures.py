"""What a caller gets if some of its requests cannot run, or fail while they run."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from jaxspec.engine.requests.output import RequestOutput
from jaxspec.errors import JaxspecError, UsageError, shown

Errors = Literal["raise", "return"]
"""Whether errors of single requests are raised, or returned in the outputs of these requests."""


class RequestFailed(JaxspecError):
    """Requests failed while they ran. It is raised when all the others have ended, too."""

    def __init__(self, message: str, outputs: Mapping[int, RequestOutput]):
        super().__init__(message)
        self.outputs = outputs
        """Outputs by the index of the prompt: from `generate` and `chat` those of all prompts,
        from a stream, whose events have the others, those of the prompts that failed."""

    def __reduce__(self) -> tuple[type, tuple[str, Mapping[int, RequestOutput]]]:
        """So that it can leave a process of a pool: exceptions are copied by their arguments."""
        return type(self), (str(self), self.outputs)


def check_errors(errors: Errors) -> None:
    if errors not in get_args(Errors):
        raise UsageError(f"errors is {shown(errors)}; expected 'raise' or 'return'")


def raise_refusals(refusals: Sequence[str | None], of_list: bool = True) -> None:
    """Raises a UsageError if some requests can never run. `of_list` is whether the caller gave a
    list of prompts, and thus can leave some out."""
    refused = [index for index, reason in enumerate(refusals) if reason is not None]
    if not refused:
        return
    first = f"{refusals[refused[0]]}"
    if not of_list:
        raise UsageError(first)
    raise UsageError(
        f"{len(refused)} of {len(refusals)} prompts cannot be continued, and none was; prompt "
        f"{refused[0]}: {first}; or pass errors='return' to continue the others"
    )


def failure_of(outputs: Mapping[int, RequestOutput], count: int) -> RequestFailed | None:
    """The error of those outputs that have one, out of `count` prompts."""
    outputs = dict(sorted(outputs.items()))
    failed = {index: one for index, one in outputs.items() if one.error is not None}
    if not failed:
        return None
    index, first = next(iter(failed.items()))
    message = f"{first.error}"
    if count > 1:
        message = (
            f"{len(failed)} of {count} requests failed; prompt {index}: {message}; all outputs are "
            "in the `outputs` of this exception, or pass errors='return'"
        )
    return RequestFailed(message, outputs)
