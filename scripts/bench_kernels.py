"""Times every kernel beside its XLA reference and the bytes it has to move.

    python scripts/bench_kernels.py --page-size 16 64 --anchors docs/results/peers-h100.json \
        --json docs/results/kernels-h100.json
    python scripts/bench_kernels.py --sweep        # paged attention with every choice of sizes

Calls are chained inside one compiled program: each call's queries are the last call's output, so
that nothing overlaps. Like the layers of a model, the calls use caches of keys and values that
together exceed the L2 cache. The file is written after every row, so that a time limit costs only
the rows that are missing.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from kernel_cases import (
    CASES,
    AttentionCase,
    Case,
    ChainCase,
    DeltaCase,
    MixerCase,
    NormCase,
    ProductCase,
    WriteCase,
)
from measuring import about, write_json
from time_mixers import chain_of, inputs_of

from jaxspec import cli
from jaxspec.console.files import read_json
from pallas_kernels import (
    NotForThisKernel,
    add_norm,
    delta_fold,
    delta_prefill,
    delta_read,
    dense_chain,
    fp8_product,
    pack_queries,
    paged_attention,
    qkv_write,
)
from pallas_kernels.dense_chain import first_arrivals
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_product import Fp8Matrix, quantised_blocks
from pallas_kernels.paged_attention import blocks as attention_blocks
from pallas_kernels.paged_attention import mosaic, portable
from pallas_kernels.paged_attention.blocks import BlockSizes
from pallas_kernels.paged_attention.plan import make_plan
from pallas_kernels.paged_attention.seen import Mask
from pallas_kernels.tiles import SHARED_BYTES

BYTES_BEYOND_CACHE = 200e6
CALLS, LAYERS = 36, 8
"""Calls per program, and calls per program of the dense chain, each with matrices that exceed the
L2 cache."""
COPY_TB_S = {"NVIDIA H200": 4.3}
H100_COPY_TB_S = 2.95
"""Measured copy bandwidths. The share of the bandwidth is relative to that of the device in use, or
to the H100's if it is not known."""

OPS = (
    "paged_attention",
    "qkv_write",
    "add_norm",
    "dense_chain",
    "delta_read",
    "delta_fold",
    "delta_prefill",
    "mixer_step",
    "block_step",
    "mixer_fold",
    "block_fold",
    "block_folds",
    "fp8_product",
)

Shape = tuple[int, int, str]
"""Slots, context and kind of query of an attention call, as the file of peers names them."""


def main() -> None:
    options = parse()
    rows = sweep(options) if options.sweep else compare(options)
    report = about() | {"copy_tb_s": copy_tb_s(), "rows": []}
    for row in rows:
        print(json.dumps(row), flush=True)
        report["rows"].append(row)
        write_json(options.json, report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--cases", choices=CASES, default="h100", help="sizes of the calls")
    parser.add_argument("--only", nargs="+", choices=OPS, default=OPS)
    sizes = ("width", 16), ("heads", 32), ("kv-heads", 8), ("head-dim", 128)
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default, help="of the sweep")
    parser.add_argument(
        "--implementations",
        nargs="+",
        default=["mosaic", "xla"],
        choices=["mosaic", "portable", "xla"],
    )
    parser.add_argument("--sweep", action="store_true", help="every choice of sizes instead")
    parser.add_argument("--kv-tiles", type=int, nargs="+", default=[64, 128], help="of the sweep")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], help="of the sweep")
    parser.add_argument(
        "--page-size", type=int, nargs="+", default=[16], help="of paged attention's caches"
    )
    parser.add_argument("--anchors", type=Path, help="JSON with another kernel's times")
    return parser.parse_args()


def compare(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of all cases: first paged attention at every page size, then the others once each."""
    peers = peer_times(options.anchors) if options.anchors else {}
    for case in cases_of(options):
        seconds, refused = times_and_refusals(case, options.implementations)
        if isinstance(case, ProductCase):
            seconds["bf16"] = time_product(case, product_in_bf16)
        if not seconds:
            yield {"op": case.op, "case": case.name} | refused
            continue
        shape = attention_shape(case)
        yield row_of(case, seconds) | refused | (peers.get(shape, {}) if shape else {})


def times_and_refusals(
    case: Case, implementations: Sequence[Implementation]
) -> tuple[dict[str, float], dict[str, str]]:
    """The seconds of each implementation, and why it cannot do the call if it says so."""
    seconds, refused = {}, {}
    for name in implementations:
        try:
            seconds[name] = seconds_of(case, name)
        except NotForThisKernel as refusal:
            refused[f"{name}_refused"] = str(refusal)
    return seconds, refused


def cases_of(options: argparse.Namespace) -> Iterable[Case]:
    cases = CASES[options.cases]
    of_each_page_size = [
        dataclasses.replace(case, page_size=page_size)
        for page_size in options.page_size
        for case in cases.attention
    ]
    of_recurrence = *cases.deltas, *cases.mixers
    others = *cases.writes, *cases.norms, *cases.chains, *of_recurrence, *cases.products
    return [case for case in (*of_each_page_size, *others) if case.op in options.only]


def peer_times(path: Path) -> dict[Shape, dict[str, Any]]:
    """The peer's kernel and its microseconds, by shape of attention, from a file of peers."""
    return {
        (timed["batch"], timed["context"], query): {"peer": timed["kernel"], "peer_us": us}
        for timed in read_json(path)["attention_kernels"]
        for query, us in timed["us"].items()
    }


def attention_shape(case: Case) -> Shape | None:
    """The shape as the peers' file names it; None for other ops and head sizes, of which the file
    has no times."""
    if not isinstance(case, AttentionCase) or case.head_dim != 128:
        return None
    return case.slots, case.context, f"q{case.width}_{'causal' if case.causal else 'full'}"


def sweep(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Paged attention with every choice of sizes that fits."""
    of_model = options.heads, options.kv_heads, options.head_dim
    for slots, context in CASES[options.cases].contexts:
        case = AttentionCase(slots, context, options.width, True, options.page_size[0], *of_model)
        if "mosaic" in options.implementations:
            sizes = choices_for(case, options.kv_tiles, options.stages)
            choices = [(vars(one), {"sizes": one}) for one in sizes]
            yield from sweep_case(case, "mosaic", mosaic.paged_attention, choices)
        if "portable" in options.implementations:
            choices = [({"splits": n}, {"splits": n}) for n in (1, 2, 4, 8, 16, 32)]
            yield from sweep_case(case, "portable", portable.paged_attention, choices)


def sweep_case(
    case: AttentionCase,
    name: str,
    attention: Callable,
    choices: list[tuple[dict[str, Any], dict[str, Any]]],
) -> Iterator[dict[str, Any]]:
    """A row for each choice: what it is called, and what the kernel is given."""
    query, *fixed = attention_inputs(case)
    counts = jnp.full(case.slots, case.width, jnp.int32)

    def compiled(given: dict[str, Any]) -> Callable:
        attend = functools.partial(attention, counts=counts, causal=True, window=None, **given)
        return compiled_chain(attention_chain(attend, CALLS), query, tuple(fixed))

    with ThreadPoolExecutor() as pool:
        chains = list(pool.map(compiled, [given for _, given in choices]))
    for (shown, _), chain in zip(choices, chains):
        seconds = seconds_of_chain(chain, query, tuple(fixed), CALLS, batches=5, runs=6)
        yield row_of(case, {name: seconds}) | shown


def choices_for(case: AttentionCase, kv_tiles: list[int], stages: list[int]) -> list[BlockSizes]:
    """The sizes that the kernel can have for these calls, up to four thread blocks for each
    multiprocessor. If a request has one tile of rows, a second warpgroup would repeat it."""
    group = case.heads // case.kv_heads
    pages = case.context // case.page_size
    shape = attention_blocks.Shape(
        case.slots, case.kv_heads, case.width, group, case.head_dim, case.page_size, pages
    )
    warpgroups = (1, 2) if shape.row_tiles > 1 else (1,)
    tried = itertools.product(kv_tiles, stages, (1, 2, 4, 8), warpgroups)

    def fits(sizes: BlockSizes) -> bool:
        clusters = shape.blocks * attention_blocks.tile(shape, sizes).row_blocks
        try:
            plan = make_plan(shape, sizes, jnp.bfloat16, Mask(True, None, False), interpreted=False)
        except NotForThisKernel:
            return False
        most = 4 * attention_blocks.MULTIPROCESSORS
        return clusters * sizes.splits <= most and plan.shared_bytes <= SHARED_BYTES

    return [sizes for sizes in itertools.starmap(BlockSizes, tried) if fits(sizes)]


def copy_tb_s() -> float:
    return COPY_TB_S.get(jax.devices()[0].device_kind, H100_COPY_TB_S)


def row_of(case: Case, seconds: dict[str, float]) -> dict[str, Any]:
    """A row with the share of the bandwidth and the rate of the kernel, or of the reference if the
    kernel was not timed."""
    floor = case.moved_bytes / copy_tb_s() / 1e6
    judged = seconds.get("mosaic", next(iter(seconds.values())))
    return {
        "op": case.op,
        "case": case.name,
        **{f"{name}_us": round(value * 1e6, 2) for name, value in seconds.items()},
        "floor_us": round(floor, 2),
        "share_of_bandwidth": round(floor / judged / 1e6, 3),
        "tflop_s": round(case.operations / judged / 1e12, 1),
    }


def seconds_of(case: Case, implementation: Implementation) -> float:
    """Seconds of one call."""
    if isinstance(case, AttentionCase):
        return time_attention(case, implementation)
    if isinstance(case, WriteCase):
        return time_write(case, implementation)
    if isinstance(case, NormCase):
        return time_norm(case, implementation)
    if isinstance(case, ProductCase):
        options = {"quantise_inputs": case.quantise_inputs, "implementation": implementation}
        return time_product(case, functools.partial(fp8_product, **options))
    if isinstance(case, DeltaCase):
        return time_delta(case, implementation)
    if isinstance(case, MixerCase):
        return time_mixer(case, implementation)
    return time_chain(case, implementation)


def seconds_per_call(
    program: Callable, carried: Any, fixed: tuple, calls: int, batches: int = 7, runs: int = 8
) -> float:
    """Seconds per call, as the median over batches of runs that are dispatched back to back;
    `carried` is donated."""
    compiled = compiled_chain(program, carried, fixed)
    return seconds_of_chain(compiled, carried, fixed, calls, batches, runs)


def compiled_chain(program: Callable, carried: Any, fixed: tuple) -> Callable:
    return jax.jit(program, donate_argnums=0).lower(carried, *fixed).compile()


def seconds_of_chain(
    compiled: Callable, carried: Any, fixed: tuple, calls: int, batches: int = 7, runs: int = 8
) -> float:
    carried = jax.tree.map(jnp.copy, carried)
    for _ in range(3):
        carried = jax.block_until_ready(compiled(carried, *fixed))
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(runs):
            carried = compiled(carried, *fixed)
        jax.block_until_ready(carried)
        times.append((time.perf_counter() - start) / runs / calls)
    return statistics.median(times)


@functools.partial(jax.jit, static_argnums=1)
def normal(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def time_attention(case: AttentionCase, implementation: Implementation) -> float:
    query, *fixed = attention_inputs(case)
    attend = functools.partial(paged_attention, causal=case.causal, implementation=implementation)
    calls = CALLS if implementation != "xla" and case.width <= 32 else 6
    return seconds_per_call(attention_chain(attend, calls), query, tuple(fixed), calls)


def attention_inputs(case: AttentionCase, seed: int = 0) -> tuple:
    """Queries, keys and values of each layer's cache, page table, lengths."""
    random = np.random.default_rng(seed)
    pages_per_slot = case.context // case.page_size
    pages = case.slots * pages_per_slot + 1
    layers = int(min(CALLS, max(2, -(-BYTES_BEYOND_CACHE // case.cache_bytes))))
    shape = (pages, case.page_size, case.kv_heads, case.head_dim)
    keys = jax.random.split(jax.random.key(seed), 2 * layers + 1)
    caches = [(normal(keys[2 * i], shape), normal(keys[2 * i + 1], shape)) for i in range(layers)]
    query = normal(keys[-1], (case.slots, case.width, case.heads, case.head_dim))
    table = 1 + random.permutation(pages - 1).reshape(case.slots, pages_per_slot)
    lengths = jnp.full(case.slots, case.context - case.width, jnp.int32)
    return pack_queries(query, case.kv_heads), caches, jnp.asarray(table, jnp.int32), lengths


def attention_chain(attend: Callable, calls: int) -> Callable:
    """`calls` attentions, one after the other: the output's numbers are the next queries."""

    def chain(query: Array, caches: Any, table: Array, lengths: Array) -> Array:
        for i in range(calls):
            keys, values = caches[i % len(caches)]
            query = attend(query, keys, values, table, lengths).reshape(query.shape)
        return query

    return chain


def time_write(case: WriteCase, implementation: Implementation) -> float:
    fixed, cache = write_inputs(case)
    write = functools.partial(qkv_write, eps=1e-6, implementation=implementation)

    def chain(carried: Any, qkv: Array, scale: Array, cos: Array, sin: Array, cells: Array) -> Any:
        (keys, values), _ = carried
        queries = []
        for _ in range(CALLS):
            query, keys, values = write(qkv, scale, scale, cos, sin, cells, keys, values)
            queries.append(query)
        return (keys, values), queries

    query = jax.eval_shape(chain, (cache, None), *fixed)[1][0]
    queries = [jnp.zeros(query.shape, query.dtype) for _ in range(CALLS)]
    return seconds_per_call(chain, (cache, queries), fixed, CALLS)


def write_inputs(case: WriteCase) -> tuple[tuple[Array, ...], tuple[Array, Array]]:
    """The inputs of a write: everything but the cache, and then the cache."""
    of_cells, of_scale, of_angle, of_qkv, of_keys, of_values = jax.random.split(
        jax.random.key(0), 6
    )
    tokens = case.slots * case.width
    pages = tokens // case.page_size + 2
    cells = jax.random.permutation(of_cells, (pages - 1) * case.page_size)[:tokens]
    cells = (case.page_size + cells).reshape(case.slots, case.width).astype(jnp.int32)
    angle = jax.random.normal(of_angle, (case.slots, case.width, case.head_dim // 2))
    qkv = normal(of_qkv, (1, case.slots, case.width, case.fused))
    shape = (pages, case.page_size, case.kv_heads, case.head_dim)
    fixed = (qkv, normal(of_scale, (case.head_dim,)), jnp.cos(angle), jnp.sin(angle), cells)
    return fixed, (normal(of_keys, shape), normal(of_values, shape))


def time_norm(case: NormCase, implementation: Implementation) -> float:
    """Seconds of one call. The norm of one is what the next adds, as the output of a layer. Without
    the barrier XLA would compute all calls in one fusion."""
    shape = case.tokens, case.hidden
    x, normed = (normal(key, shape) for key in jax.random.split(jax.random.key(0)))
    add: Any = functools.partial(add_norm, eps=1e-6, implementation=implementation)

    def chain(carried: Any, scale: Array) -> Any:
        x, normed = carried
        for _ in range(CALLS):
            x, normed = jax.lax.optimization_barrier(add(x, normed[None], scale))
        return x, normed

    return seconds_per_call(chain, (x, normed), (jnp.ones(case.hidden, x.dtype),), CALLS)


def time_delta(case: DeltaCase, implementation: Implementation) -> float:
    """Seconds of one call. The states of all layers are in one array, so that each call waits for
    the one before."""
    rows, state = delta_inputs(case)
    layers, lengths = state.shape[0] // case.slots, jnp.ones(case.slots, jnp.int32)

    counts = jnp.full(case.slots, case.counts, jnp.int32)

    def slots_of(i: int) -> Array:
        return i % layers * case.slots + jnp.arange(case.slots, dtype=jnp.int32)

    def reads(value: Array, query: Array, key: Array, log_decay: Array, beta: Array, state: Array):
        for i in range(CALLS):
            given = query, key, value, log_decay, beta, state, slots_of(i), lengths
            if case.op == "delta_read":
                value = delta_read(*given, implementation=implementation)
            else:
                value, _ = delta_prefill(*given, counts, implementation=implementation)
        return value

    def folds(state: Array, value: Array, key: Array, log_decay: Array, beta: Array) -> Array:
        for i in range(CALLS):
            given = key, value, log_decay, beta, state, slots_of(i), lengths, counts
            state = delta_fold(*given, implementation=implementation)
        return state

    value, query, key, *scalars = rows
    if case.op == "delta_fold":
        return seconds_per_call(folds, state, (value, key, *scalars), CALLS)
    return seconds_per_call(reads, value, (query, key, *scalars, state), CALLS)


def delta_inputs(case: DeltaCase) -> tuple[tuple[Array, ...], Array]:
    """Values, queries, keys, log decays and beta, and the states of as many layers as exceed the
    cache."""
    of_value, of_query, of_key, of_state = jax.random.split(jax.random.key(0), 4)
    leading = (case.slots, case.width)
    of_keys = (*leading, case.key_heads, case.dim)
    heads = (*leading, case.value_heads)
    layers = int(min(CALLS, -(-BYTES_BEYOND_CACHE // case.state_bytes)))
    states = (layers * case.slots, case.value_heads, case.dim, case.dim)
    rows = normal(of_value, (*heads, case.dim)), normal(of_query, of_keys), normal(of_key, of_keys)
    scalars = jnp.full(heads, -0.1, jnp.float32), jnp.full(heads, 0.5, jnp.float32)
    return (*rows, *scalars), jax.random.normal(of_state, states, jnp.float32)


def time_mixer(case: MixerCase, implementation: Implementation) -> float:
    of_state = 4 * case.slots * case.value_heads * case.dim**2
    layers = int(min(CALLS, -(-BYTES_BEYOND_CACHE // of_state)))
    layers = CALLS if case.op == "block_folds" else layers
    inputs, of_rows, of_slots, left = inputs_of(case, layers)
    chain = chain_of(case, implementation, CALLS)
    outputs = jax.eval_shape(chain, (of_slots, None), inputs, of_rows, left)[1]
    carried = of_slots, jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), outputs)
    return seconds_per_call(chain, carried, (inputs, of_rows, left), CALLS)


def time_chain(case: ChainCase, implementation: Implementation) -> float:
    layers = [chain_weights(case, layer) for layer in range(LAYERS)]
    attended = normal(jax.random.key(LAYERS), (case.tokens, case.shape.attended))

    def chain(carried: Any, attended: Array, layers: Any) -> Any:
        x, _ = carried
        arrivals, seen = first_arrivals(), []
        for weights in layers:
            x, qkv, arrivals = dense_chain(
                attended,
                x,
                **weights,
                arrivals=arrivals,
                eps=1e-6,
                quantise_inputs=case.quantise_inputs,
                implementation=implementation,
            )
            if qkv is not None:
                seen.append(qkv[0, :8])
        return x, seen

    x = jnp.zeros((case.tokens, case.shape.hidden), jnp.bfloat16)
    seen = jax.eval_shape(chain, (x, None), attended, layers)[1]
    carried = (x, [jnp.zeros(part.shape, part.dtype) for part in seen])
    return seconds_per_call(chain, carried, (attended, layers), LAYERS)


def chain_weights(case: ChainCase, layer: int) -> dict[str, Array | Fp8Matrix | None]:
    shape, keys = case.shape, iter(jax.random.split(jax.random.key(layer), 4))

    def matrix(inputs: int, outputs: int) -> Array | Fp8Matrix:
        made = normal(next(keys), (inputs, outputs)) * inputs**-0.5
        return Fp8Matrix(*jax.jit(quantised_blocks)(made.T)) if case.fp8 else made

    scale = jnp.ones((shape.hidden,), shape.norm_dtype or "bfloat16")
    return {
        "out": matrix(shape.attended, shape.hidden),
        "norm": scale,
        "gate_up": matrix(shape.hidden, 2 * shape.inner),
        "down": matrix(shape.inner, shape.hidden),
        "next_norm": scale,
        "qkv": matrix(shape.hidden, shape.qkv) if shape.qkv else None,
    }


def time_product(case: ProductCase, product: Callable[..., Array]) -> float:
    x, matrices = product_operands(case, in_8_bits=product is not product_in_bf16)
    return seconds_per_call(product_chain(case, product), x, (matrices,), CALLS)


def product_chain(case: ProductCase, product: Callable[..., Array]) -> Callable:
    """Chained products. The outputs of one, cut off or repeated to the right size, are the inputs
    of the next, which costs a small kernel more."""
    inputs, outputs = case.sides
    once = jax.jit(product)

    def chain(x: Array, matrices: list[tuple[Array, ...]]) -> Array:
        for i in range(CALLS):
            y = once(x, *matrices[i % len(matrices)])
            x = jnp.tile(y, (1, math.ceil(inputs / outputs)))[:, :inputs]
        return x

    return chain


def product_operands(case: ProductCase, in_8_bits: bool) -> tuple[Array, list[tuple[Array, ...]]]:
    """Rows, and more matrices than the GPU's cache holds."""
    inputs, outputs = case.sides
    layers = min(CALLS, max(2, math.ceil(BYTES_BEYOND_CACHE / (inputs * outputs))))
    matrices = [matrix_of(case, in_8_bits, layer) for layer in range(layers)]
    return normal(jax.random.key(layers), (case.tokens, inputs)), matrices


def matrix_of(case: ProductCase, in_8_bits: bool, layer: int) -> tuple[Array, ...]:
    inputs, outputs = case.sides
    matrix = normal(jax.random.key(layer), (outputs, inputs)) * inputs**-0.5
    return jax.jit(quantised_blocks)(matrix) if in_8_bits else (matrix.T,)


def product_in_bf16(x: Array, matrix: Array) -> Array:
    """The same product with a 16-bit matrix, by XLA, for comparison."""
    return x @ matrix


if __name__ == "__main__":
    sys.exit(cli.run(main))
