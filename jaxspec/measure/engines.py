"""Engines that share parameters, one per method, with only the programs that the loads use."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxspec.checkpoint.fp8_config import OF_DRAFTER, Quantization, check_quantization
from jaxspec.checkpoint.fp8_names import quantised_drafter
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import shapes_for
from jaxspec.engine.plan.planning import WIDTH_WITHOUT_DRAFTER
from jaxspec.engine.plan.shards import with_shards
from jaxspec.engine.setup.copied_head import copying_head, with_copied_head
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.setup.placement import places_of
from jaxspec.engine.setup.warmup import compile_side_by_side
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.layers.shards import Shards
from jaxspec.measure.load import Work
from jaxspec.models.config import DrafterConfig, TargetConfig
from jaxspec.models.parameters import Place, random_params, where_it_is
from jaxspec.models.presets import drafter_for, published
from jaxspec.models.sharding import Placement
from jaxspec.models.targets import target_of, without_features
from jaxspec.proposers.drafters import proposer_of
from jaxspec.proposers.methods import DRAFTERS, METHODS


def random_pair(
    shape: str,
    block_size: int | None,
    dtype: DTypeLike,
    seed: int = 0,
    kind: str = DRAFTERS[0],
    devices: int = 1,
    draft_quantization: Quantization = None,
) -> Opened:
    """A published geometry with random weights, and a drafter of this kind for it; nothing is
    downloaded. With `draft_quantization`, the matrices of the drafter's layers and its copy of the
    head are in 8 bits."""
    check_quantization(draft_quantization, OF_DRAFTER)
    config = published(shape)
    draft = drafter_for(kind, config, block_size)
    if draft_quantization is not None:
        draft = quantised_drafter(draft, f"the drafter for {shape}")
    return random_models(config, draft, dtype, seed, devices)


def random_models(
    config: TargetConfig, draft: DrafterConfig, dtype: DTypeLike, seed: int = 0, devices: int = 1
) -> Opened:
    """A target and its drafter with random weights, which are spread over this many devices."""
    target = target_of(config, draft.target_layer_ids, dtype)
    without_copy, draft = proposer_of(draft, dtype), copying_head(draft, devices)
    models = Models(target, (proposer_of(draft, dtype),))
    places = places_of(with_shards(models, Shards(devices)))
    target_key, drafter_key = jax.random.split(jax.random.key(seed))
    params = {
        "target": random_params(target, target_key, _place(places.get("target"))),
        "drafter": random_params(without_copy.drafter, drafter_key, _place(places.get("drafter"))),
    }
    params = with_copied_head(draft, jax.block_until_ready(params))
    return Opened(models, params, None, None)


def _place(places: Mapping[str, Placement] | None) -> Place:
    """Puts a parameter where it belongs; without places it stays where it is."""
    if places is None:
        return where_it_is
    return lambda path, parameter: places[path].placed(parameter)


def without_drafter(opened: Opened) -> Opened:
    """The target alone; it captures no features, which plain decoding does not need."""
    target = without_features(opened.models.target)
    return dataclasses.replace(
        opened, models=Models(target), params={"target": opened.params["target"]}
    )


def engines_for(
    opened: Opened,
    methods: Sequence[str],
    concurrencies: Sequence[int],
    work: Sequence[Work],
    page_size: int,
    max_model_len: int | None = None,
    **options: Any,
) -> dict[str, Engine]:
    """An engine per method, with a slot for each of the most requests at once, and room in every
    slot for `max_model_len` positions, or for the longest of these requests. It decodes in the
    batch sizes that engines have by default: at the end of a pass fewer requests run than before.
    """
    longest = max(len(one.prompt) + one.params.max_tokens for one in work)
    if max_model_len is not None:
        if max_model_len < longest:
            raise UsageError(
                f"max_model_len is {max_model_len}; expected at least {longest}, the length of the "
                "longest request with its output"
            )
        longest = max_model_len
    pages_each = -(-(longest + _widest_block(opened, options)) // page_size)
    return {
        method: engine_for(
            opened,
            method,
            None,
            [len(one.prompt) for one in work],
            max_batch=max(concurrencies),
            max_model_len=longest,
            page_size=page_size,
            num_pages=pages_each * max(concurrencies),
            **options,
        )
        for method in methods
    }


def _widest_block(opened: Opened, options: Mapping[str, Any]) -> int:
    drafts = [one.num_drafts for one in opened.models.proposers]
    return max(WIDTH_WITHOUT_DRAFTER, 1 + max(*drafts, options.get("num_drafts") or 0, 0))


def engine_for(
    opened: Opened,
    method: str,
    batch_sizes: Sequence[int] | None,
    prompt_lengths: Sequence[int],
    **options: Any,
) -> Engine:
    """An engine that compiles decode steps only for these batch sizes, if any are given, and
    prefill steps only in the widths that prompts of these lengths need. An adaptive engine keeps
    its default batch sizes.
    `prefix_caching` is off by default, so that every prompt is read in full and its time counts;
    `compile_ahead` is off, so that nothing else runs beside the steps.
    """
    options.setdefault("prefix_caching", False)
    options.setdefault("compile_ahead", False)
    if method in METHODS and not METHODS[method].drafter:
        opened = without_drafter(opened)
    if method == "none":
        options["synthetic_acceptance"] = None
    sizes = EngineOptions(method=method, **options)
    shapes = shapes_for(sizes.max_batch, min(sizes.prefill_chunk, sizes.max_model_len), sizes.exact)
    if batch_sizes is not None and not (sizes.exact or sizes.adaptive):
        options["batch_sizes"] = tuple(sorted(batch_sizes))
    options["prefill_shapes"] = _needed_shapes(shapes.prefill_shapes, prompt_lengths)
    return Engine.from_models(
        opened.models, opened.params, opened.tokenizer, method=method, **options
    )


def _needed_shapes(
    shapes: tuple[tuple[int, int], ...], prompt_lengths: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The shapes of the largest width, and of each smaller width that fits the last chunk of some
    prompt."""
    widths = sorted({width for _, width in shapes})
    ends = {(length - 1) % widths[-1] + 1 for length in prompt_lengths}
    needed = {widths[-1], *(next(w for w in widths if w >= end) for end in ends)}
    return tuple(shape for shape in shapes if shape[1] in needed)


def compile_all(
    engines: Sequence[Engine], draws: bool, progress: Callable[[int, int], None] | None = None
) -> int:
    """Compiles every program that these engines can need, and returns their number. `progress` is
    called with how many are ready and how many are known so far."""
    programs = (p for engine in engines for p in engine.programs(draws, only_needed=True))
    return compile_side_by_side(programs, progress)
