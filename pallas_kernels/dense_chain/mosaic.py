"""`dense_chain` on Mosaic GPU, for Hopper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dense_chain import kernel
from pallas_kernels.dense_chain.plan import (
    CONSUMERS,
    PAIR,
    PAIRS,
    Plan,
    Sizes,
    check,
    check_device,
    choose_sizes,
)
from pallas_kernels.dense_chain.shape import Arrivals, ChainShape
from pallas_kernels.kept import kept
from pallas_kernels.tiles import named, require


@kept(static_argnames=("eps", "sizes", "pairs", "interpret"))
def dense_chain(
    attended: Float[Array, "tokens attended"],
    x: Float[Array, "tokens hidden"],
    out: Float[Array, "attended hidden"],
    norm: Float[Array, " hidden"],
    gate_up: Float[Array, "hidden twice_inner"],
    down: Float[Array, "inner hidden"],
    next_norm: Float[Array, " hidden"],
    qkv: Float[Array, "hidden fused"] | None,
    arrivals: Arrivals,
    *,
    eps: float,
    sizes: Sizes | None = None,
    pairs: int = PAIRS,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals]:
    inputs = {
        "attended": attended,
        "x": x,
        "out": out,
        "norm": norm,
        "gate_up": gate_up,
        "down": down,
        "next_norm": next_norm,
        "qkv": qkv,
    }
    inputs = {name: array for name, array in inputs.items() if array is not None}
    shape = ChainShape(
        x.shape[0],
        attended.shape[1],
        x.shape[1],
        down.shape[0],
        0 if qkv is None else qkv.shape[1],
    )
    require(len({a.dtype for a in inputs.values()}) == 1, "all inputs in one dtype")
    check(shape, x.dtype, pairs)
    plan = Plan(shape, eps, x.dtype, pairs, sizes or choose_sizes(shape.tokens), None)
    if interpret is None:
        check_device()
        counters = jax.new_ref(arrivals.counters)
        calls = jnp.full((1,), arrivals.calls + 1, jnp.int32)
        outputs = launch(plan, inputs | {"counters": counters, "calls": calls}, None)
        arrivals = Arrivals(jax.freeze(counters), arrivals.calls + 1)
    else:
        outputs = inputs
        for p in range(plan.products):
            outputs = outputs | launch(dataclasses.replace(plan, only=p), outputs, interpret)
    return outputs["total"], outputs.get("next_qkv"), arrivals


def launch(plan: Plan, inputs: dict[str, jax.Array], interpret) -> dict[str, jax.Array]:
    outputs = plan.outputs()
    results = plgpu.kernel(
        named("dense_chain", functools.partial(kernel.run, plan, (*inputs, *outputs))),
        out_type=tuple(outputs.values()),
        grid=(plan.pairs,),
        grid_names=("pair",),
        cluster=(PAIR,),
        cluster_names=("half",),
        num_threads=CONSUMERS + 2,
        thread_name="warpgroup",
        scratch_types=plan.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*inputs.values())
    return dict(zip(outputs, results))
