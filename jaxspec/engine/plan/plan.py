"""How an engine is laid out: fixed from its making on."""

import dataclasses
import logging

import jax

from jaxspec.acceptance.synthetic import SyntheticAcceptance, from_length, from_rates
from jaxspec.engine.plan.options import DRIVERS, Acceptance, EngineOptions
from jaxspec.engine.plan.shapes import Shapes, shapes_for
from jaxspec.engine.requests.request import Request
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.proposers.lookup import Lookup, lookup_of
from jaxspec.proposers.methods import METHODS

log = logging.getLogger("jaxspec")

WIDTH_WITHOUT_DRAFTER = 16
NARROWER_WIDTHS = (1, 4, 8)
"""Of verify steps, beside the drafter's own, where spans adapt."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and choices that no request changes."""

    method: str
    """A name of `METHODS`."""
    driver: str
    """lockstep or overlapped."""
    exact: bool
    """Every phase runs through one program of one shape, so that a row's bits never differ."""
    width: int
    """Rows of a slot in a verify step: the current token and its drafts."""
    block_size: int
    """Widest block that is ever written; pages are held for one beyond every budget."""
    num_slots: int
    max_model_len: int
    """Tokens of prompt and output together."""
    page_size: int
    num_pages: int
    """Pages of the pools, the trash page among them."""
    shapes: Shapes
    drawn_drafts: bool = False
    """Whether the drafter draws its drafts for requests that draw."""
    tiers: tuple[int, ...] = ()
    """Widths that adaptive spans choose from, rising; empty where they do not adapt."""
    lookup: Lookup | None = None
    """What the device looks up itself; None where it does not."""

    @property
    def max_pages(self) -> int:
        """Pages that one slot's row of the page table has room for."""
        return -(-(self.max_model_len + self.block_size) // self.page_size)

    @property
    def drafter(self) -> bool:
        """Whether the drafter proposes, on the device."""
        return METHODS[self.method].drafter

    @property
    def host(self) -> bool:
        """Whether somebody proposes on the host, who has to read a step before the next."""
        return METHODS[self.method].host is not None and self.lookup is None

    @property
    def keeps_tokens(self) -> bool:
        """Whether the state has them; with `exact` always, so that its programs stay the same."""
        return self.exact or self.lookup is not None

    def tier(self, width: int) -> dict[str, int]:
        """How a program is asked for this width: the whole one goes without saying."""
        return {} if width == self.width else {"width": width}

    def rows_of(self, request: Request) -> int:
        """Rows a request can ever write: its budget, and a block that begins at its end."""
        return request.length_limit + self.block_size


def plan_engine(models: Models, options: EngineOptions) -> Plan:
    """The layout, but for the number of pages, which depends on what memory is left."""
    method = choose_method(options.method, models.drafter is not None)
    block_size = _block_size(models, options)
    max_model_len = context_limit(models, options.max_model_len)
    chunk = min(options.prefill_chunk, max_model_len)
    driver = choose_driver(options.driver, options.synthetic_acceptance is not None)
    width = _width(method, options, block_size)
    looks_up = METHODS[method].looks_up and driver == "overlapped"
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
        shapes=shapes_for(options.max_batch, chunk, options.exact),
        drawn_drafts=options.draft_sampling == "drawn" and not options.exact,
        tiers=_tiers(method, options, block_size),
        lookup=lookup_of(options, width - 1) if looks_up else None,
    )


def _block_size(models: Models, options: EngineOptions) -> int:
    """The same whatever the method, for `exact`."""
    if models.drafter is not None:
        return models.drafter.config.block_size
    return max(WIDTH_WITHOUT_DRAFTER, options.num_drafts + 1)


def _width(method: str, options: EngineOptions, block_size: int) -> int:
    if options.exact or METHODS[method].drafter:
        return block_size
    if METHODS[method].host is None:
        return 1
    return min(options.num_drafts + 1, block_size)


def _tiers(method: str, options: EngineOptions, block_size: int) -> tuple[int, ...]:
    if not (options.adaptive and METHODS[method].drafter):
        return ()
    return (*(width for width in NARROWER_WIDTHS if width < block_size), block_size)


def choose_method(method: str, has_drafter: bool) -> str:
    """A name of `METHODS`; one that was asked for and cannot run is refused."""
    if method == "auto":
        return "dflash" if has_drafter else "none"
    if method not in METHODS:
        raise UsageError(f"method is {method!r}; expected one of auto, {', '.join(METHODS)}")
    if METHODS[method].drafter and not has_drafter:
        raise UsageError(
            f"method is {method!r} but no drafter is given; name one with draft= or --draft-model"
        )
    return method


def synthetic_of(asked: Acceptance | None, num_drafts: int) -> SyntheticAcceptance | None:
    """What `EngineOptions.synthetic_acceptance` means for blocks with so many drafts."""
    if asked is None:
        return None
    is_length = isinstance(asked, int | float)
    return from_length(asked, num_drafts) if is_length else from_rates(asked, num_drafts)


def choose_driver(driver: str, synthetic: bool) -> str:
    if driver not in DRIVERS:
        raise UsageError(f"driver is {driver!r}; expected one of {', '.join(DRIVERS)}")
    if driver != "auto":
        return driver
    return "lockstep" if jax.default_backend() == "cpu" and not synthetic else "overlapped"


def context_limit(models: Models, asked: int) -> int:
    """The longest prompt and output together that both models were made for."""
    limits = {"target": models.target.config.decoder.max_position_embeddings}
    if models.drafter is not None:
        config = models.drafter.config
        limits["drafter"] = config.decoder.max_position_embeddings - config.block_size
    name = min(limits, key=limits.get)
    if asked > limits[name]:
        log.info("context limited to %d tokens by the %s", limits[name], name)
    return min(asked, limits[name])
