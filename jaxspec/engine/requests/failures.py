"""What a caller gets if some of its requests cannot run, or fail while they run."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from jaxspec.engine.requests.output import RequestOutput
from jaxspec.errors import JaxspecError, UsageError, shown

Errors = Literal["raise", "return"]
"""Whether errors of single requests are raised, or returned in the outputs of these requests."""


class RequestFailed(JaxspecError):
    """Some requests failed while they ran. Raised after all other requests have ended, too."""

    def __init__(self, message: str, outputs: Mapping[int, RequestOutput]):
        super().__init__(message)
        self.outputs = outputs
        """Outputs by the index of the prompt. `generate` and `chat` give those of all prompts, a
        stream only those that failed, because its events have delivered the others."""

    def __reduce__(self) -> tuple[type, tuple[str, Mapping[int, RequestOutput]]]:
        """Lets a process of a pool send the exception to another one: by default an exception is
        made again from `args`, which lacks the outputs."""
        return type(self), (str(self), self.outputs)


def check_errors(errors: Errors) -> None:
    if errors not in get_args(Errors):
        raise UsageError(f"errors is {shown(errors)}; expected 'raise' or 'return'")


def raise_refusals(refusals: Sequence[str | None], of_list: bool = True) -> None:
    """Raises a UsageError if some requests can never run. `of_list` says whether the caller gave a
    list of prompts, and so could leave some out."""
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
    """The exception for the outputs with an error, out of `count` prompts; None without any."""
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
