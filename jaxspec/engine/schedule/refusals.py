"""Refuses requests that would otherwise wait for ever."""

from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule.pages import PageBook


def never_fits(request: Request, plan: Plan, book: PageBook, max_model_len: int) -> str | None:
    """Why this request can never run, however long it waits; None if it can. `max_model_len` is the
    option of the engine, which the models may have lowered."""
    tokens = len(request.prompt) + request.params.max_tokens
    if tokens > plan.max_model_len:
        by_models = plan.max_model_len < max_model_len
        remedy = "the models were made for no more" if by_models else "or raise max_model_len"
        return (
            f"prompt of {len(request.prompt)} and max_tokens {request.params.max_tokens} make "
            f"{tokens} tokens, but the context holds {plan.max_model_len}; shorten one of them, "
            f"{remedy}"
        )
    needed = book.pages_for(plan.positions_of(request.length_limit))
    if needed > book.total:
        return (
            f"the request needs {needed} pages of {plan.page_size} positions, the pool has "
            f"{book.total}; shorten it or raise num_pages or memory_fraction"
        )
    return None
