"""Times every kernel beside its XLA reference and the bytes it has to move.

    python scripts/bench_kernels.py --json docs/results/kernels-h100.json
    python scripts/bench_kernels.py --sweep        # paged attention with every choice of sizes

Calls are chained inside one compiled program (each call's queries are the last call's output, so
nothing overlaps) over pools that together exceed the L2 cache, as the layers of a model do.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.measure.environment import environment
from pallas_kernels import dense_chain, pack_queries, paged_attention, qkv_write
from pallas_kernels.dense_chain import ChainShape, first_arrivals
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.blocks import BlockSizes

BYTES_BEYOND_CACHE = 200e6
CHAIN = 36
COPY_TB_S = 2.95
"""Measured copy bandwidth of one H100 80GB HBM3; the share of bandwidth is relative to it."""


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    slots: int
    context: int
    width: int
    causal: bool
    page_size: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.slots}x{self.context} q{self.width} {mask} page {self.page_size}"

    @property
    def pool_bytes(self) -> int:
        return self.slots * self.context * self.kv_heads * self.head_dim * 2 * 2

    @property
    def moved_bytes(self) -> int:
        return self.pool_bytes + 2 * self.slots * self.width * self.heads * self.head_dim * 2

    @property
    def operations(self) -> int:
        first = self.context - self.width
        seen = sum(first + row + 1 if self.causal else self.context for row in range(self.width))
        return 4 * self.slots * self.heads * self.head_dim * seen


@functools.partial(jax.jit, static_argnums=1)
def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def attention_inputs(case: AttentionCase, seed: int = 0) -> tuple:
    """Queries, one pair of pools per layer, page table, lengths."""
    rng = np.random.default_rng(seed)
    pages_per_slot = case.context // case.page_size
    pages = case.slots * pages_per_slot + 1
    layers = int(min(CHAIN, max(2, -(-BYTES_BEYOND_CACHE // case.pool_bytes))))
    shape = (pages, case.page_size, case.kv_heads, case.head_dim)
    keys = jax.random.split(jax.random.key(seed), 2 * layers + 1)
    pools = [(normal(keys[2 * i], shape), normal(keys[2 * i + 1], shape)) for i in range(layers)]
    query = normal(keys[-1], (case.slots, case.width, case.heads, case.head_dim))
    table = 1 + rng.permutation(pages - 1).reshape(case.slots, pages_per_slot)
    lengths = jnp.full(case.slots, case.context - case.width, jnp.int32)
    return pack_queries(query, case.kv_heads), pools, jnp.asarray(table, jnp.int32), lengths


def attention_chain(attend: Callable, calls: int) -> Callable:
    """`calls` attentions, one after the other: the output's numbers are the next queries."""

    def chain(query, pools, table, lengths):
        for i in range(calls):
            keys, values = pools[i % len(pools)]
            query = attend(query, keys, values, table, lengths).reshape(query.shape)
        return query

    return chain


def seconds_per_call(
    program: Callable, carried, fixed: tuple, calls: int, batches: int = 7, runs: int = 8
) -> float:
    """Median over batches of runs that are dispatched back to back; `carried` is donated."""
    compiled = jax.jit(program, donate_argnums=0).lower(carried, *fixed).compile()
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


def time_attention(case: AttentionCase, implementation: str) -> float:
    query, *fixed = attention_inputs(case)
    attend = functools.partial(paged_attention, causal=case.causal, implementation=implementation)
    calls = CHAIN if implementation == "mosaic" and case.width <= 32 else 6
    return seconds_per_call(attention_chain(attend, calls), query, tuple(fixed), calls)


@dataclasses.dataclass(frozen=True)
class WriteCase:
    slots: int
    width: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def name(self) -> str:
        return f"{self.slots}x{self.width} rows, {self.heads}/{self.kv_heads} heads"

    @property
    def fused(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def moved_bytes(self) -> int:
        return self.slots * self.width * (2 * self.fused * 2 + self.head_dim * 4)

    @property
    def operations(self) -> int:
        return 0


def write_inputs(case: WriteCase) -> tuple:
    keys = jax.random.split(jax.random.key(0), 4)
    rows = case.slots * case.width
    pages = rows // case.page_size + 2
    pool = (pages, case.page_size, case.kv_heads, case.head_dim)
    places = case.page_size + jax.random.permutation(keys[3], (pages - 1) * case.page_size)[:rows]
    angle = jax.random.normal(keys[2], (case.slots, case.width, case.head_dim // 2))
    qkv = normal(keys[0], (1, case.slots, case.width, case.fused))
    scale = normal(keys[1], (case.head_dim,))
    places = places.reshape(case.slots, case.width).astype(jnp.int32)
    fixed = (qkv, scale, jnp.cos(angle), jnp.sin(angle), places)
    return fixed, tuple(normal(key, pool) for key in keys[:2])


def time_write(case: WriteCase, implementation: str) -> float:
    fixed, pools = write_inputs(case)
    write = functools.partial(qkv_write, eps=1e-6, implementation=implementation)

    def chain(carried, qkv, scale, cos, sin, places):
        pools, _ = carried
        queries = []
        for _ in range(CHAIN):
            query, *pools = write(qkv, scale, scale, cos, sin, places, *pools)
            queries.append(query)
        return tuple(pools), queries

    query = jax.eval_shape(chain, (pools, None), *fixed)[1][0]
    queries = [jnp.zeros(query.shape, query.dtype) for _ in range(CHAIN)]
    return seconds_per_call(chain, (pools, queries), fixed, CHAIN)


LAYERS = 8
"""Of the dense chain: several, each with matrices beyond the cache."""
GEOMETRIES = {
    "8B": (4096, 4096, 12288, 6144),
    "4B": (4096, 2560, 9728, 6144),
    "1.7B": (2048, 2048, 6144, 4096),
    "0.6B": (2048, 1024, 3072, 4096),
}
"""Of Qwen3: numbers from attention, hidden, inner, of the next qkv."""


@dataclasses.dataclass(frozen=True)
class ChainCase:
    model: str
    tokens: int

    @property
    def name(self) -> str:
        return f"Qwen3-{self.model}, {self.tokens} tokens"

    @property
    def shape(self) -> ChainShape:
        return ChainShape(self.tokens, *GEOMETRIES[self.model])

    @property
    def weights(self) -> int:
        s = self.shape
        return (s.attended + 3 * s.inner + s.qkv) * s.hidden

    @property
    def moved_bytes(self) -> int:
        s = self.shape
        return 2 * (self.weights + self.tokens * (s.attended + 2 * s.hidden + s.qkv))

    @property
    def operations(self) -> int:
        return 2 * self.tokens * self.weights


def chain_weights(case: ChainCase, layer: int) -> tuple[jax.Array, ...]:
    s, keys = case.shape, iter(jax.random.split(jax.random.key(layer), 4))
    matrix = lambda inputs, outputs: normal(next(keys), (inputs, outputs)) * inputs**-0.5
    out, gate_up = matrix(s.attended, s.hidden), matrix(s.hidden, 2 * s.inner)
    down, qkv = matrix(s.inner, s.hidden), matrix(s.hidden, s.qkv)
    scale = jnp.ones((s.hidden,), jnp.bfloat16)
    return out, scale, gate_up, down, scale, qkv


def time_chain(case: ChainCase, implementation: str) -> float:
    layers = [chain_weights(case, layer) for layer in range(LAYERS)]
    attended = normal(jax.random.key(LAYERS), (case.tokens, case.shape.attended))

    def chain(carried, attended, layers):
        x, _ = carried
        arrivals, seen = first_arrivals(), []
        for weights in layers:
            x, qkv, arrivals = dense_chain(
                attended, x, *weights, arrivals, eps=1e-6, implementation=implementation
            )
            seen.append(qkv[0, :8])
        return x, seen

    x = jnp.zeros((case.tokens, case.shape.hidden), jnp.bfloat16)
    seen = jax.eval_shape(chain, (x, None), attended, layers)[1]
    carried = (x, [jnp.zeros(part.shape, part.dtype) for part in seen])
    return seconds_per_call(chain, carried, (attended, layers), LAYERS)


CONTEXTS = ((1, 1024), (1, 4096), (8, 1024), (8, 4096), (32, 1024), (32, 4096))
ATTENTION_CASES = [
    AttentionCase(slots, context, width, causal)
    for slots, context in CONTEXTS
    for width, causal in ((1, True), (16, True), (16, False))
] + [AttentionCase(8, 2048, 512, True)]
CHAIN_CASES = [ChainCase(model, tokens) for model in GEOMETRIES for tokens in (8, 16, 32, 64)]
WRITE_CASES = [WriteCase(1, 1), WriteCase(1, 16), WriteCase(8, 16), WriteCase(32, 16)]


def row(op: str, case: AttentionCase | WriteCase | ChainCase, seconds: dict[str, float]) -> dict:
    floor = case.moved_bytes / COPY_TB_S / 1e6
    return {
        "op": op,
        "case": case.name,
        **{f"{name}_us": round(value * 1e6, 2) for name, value in seconds.items()},
        "floor_us": round(floor, 2),
        "share_of_bandwidth": round(floor / seconds["mosaic"] / 1e6, 3),
        "tflop_s": round(case.operations / seconds["mosaic"] / 1e12, 1),
    }


def compare(only: str | None, implementations: tuple[str, ...], page_size: int) -> list[dict]:
    cases = [dataclasses.replace(case, page_size=page_size) for case in ATTENTION_CASES]
    plan = [("paged_attention", case, time_attention) for case in cases]
    plan += [("qkv_write", case, time_write) for case in WRITE_CASES]
    plan += [("dense_chain", case, time_chain) for case in CHAIN_CASES]
    rows = []
    for op, case, measure in plan:
        if only in (None, op):
            rows.append(row(op, case, {name: measure(case, name) for name in implementations}))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def sweep(kv_tiles: tuple[int, ...]) -> list[dict]:
    """Paged attention with 16 rows per slot, with every choice of sizes that fits."""
    choices = itertools.product(kv_tiles, (2, 3), (1, 2, 4, 8))
    sizes = [BlockSizes(*choice) for choice in choices]
    rows = []
    for slots, context in CONTEXTS:
        case = AttentionCase(slots, context, 16, True)
        query, *fixed = attention_inputs(case)
        for chosen in sizes:
            if slots * chosen.splits > 64:
                continue
            attend = functools.partial(
                mosaic.paged_attention,
                counts=jnp.full(slots, case.width, jnp.int32),
                causal=True,
                window=None,
                sizes=chosen,
            )
            chain = attention_chain(attend, CHAIN)
            seconds = seconds_per_call(chain, query, tuple(fixed), CHAIN, batches=5, runs=6)
            rows.append(row("paged_attention", case, {"mosaic": seconds}) | vars(chosen))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="write the rows to this file")
    parser.add_argument("--only", choices=("paged_attention", "qkv_write", "dense_chain"))
    parser.add_argument("--no-xla", action="store_true", help="leave the reference out")
    parser.add_argument("--sweep", action="store_true", help="every choice of sizes instead")
    parser.add_argument("--kv-tiles", type=int, nargs="+", default=[64, 128], help="of the sweep")
    parser.add_argument("--page-size", type=int, default=16, help="of paged attention's pools")
    options = parser.parse_args()
    implementations = ("mosaic",) if options.no_xla else ("mosaic", "xla")
    rows = (
        sweep(tuple(options.kv_tiles))
        if options.sweep
        else compare(options.only, implementations, options.page_size)
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps(
                {"environment": environment() | {"copy_tb_s": COPY_TB_S}, "rows": rows}, indent=1
            )
        )


if __name__ == "__main__":
    main()
