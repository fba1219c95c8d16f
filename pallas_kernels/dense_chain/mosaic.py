"""`dense_chain` on Mosaic GPU, for Hopper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
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
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.refusal import require
from pallas_kernels.tiles import Shapes, named


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
    shape = shape_of(
        attended, x, out, norm, gate_up, down, next_norm, qkv, arrivals, eps=eps, pairs=pairs
    )
    plan = Plan(shape, eps, x.dtype, pairs, sizes or choose_sizes(shape.tokens), None)
    if interpret is None:
        check_device(dispatch.default_device())
        counters = jax.new_ref(arrivals.counters)
        calls = jnp.full((1,), arrivals.calls + 1, jnp.int32)
        outputs = launch(plan, inputs | {"counters": counters, "calls": calls}, None)
        arrivals = Arrivals(jax.freeze(counters), arrivals.calls + 1)
    else:
        outputs = inputs
        for p in range(plan.products):
            outputs = outputs | launch(dataclasses.replace(plan, only=p), outputs, interpret)
    return outputs["total"], outputs.get("next_qkv"), arrivals


def shape_of(
    attended: Float[Shapes, "tokens attended"],
    x: Float[Shapes, "tokens hidden"],
    out: Float[Shapes, "attended hidden"],
    norm: Float[Shapes, " hidden"],
    gate_up: Float[Shapes, "hidden twice_inner"],
    down: Float[Shapes, "inner hidden"],
    next_norm: Float[Shapes, " hidden"],
    qkv: Float[Shapes, "hidden fused"] | None,
    arrivals: Arrivals,
    *,
    eps: float,
    pairs: int = PAIRS,
) -> ChainShape:
    """The shape of this call; raises `NotForThisKernel` if the kernel cannot do it."""
    arrays = (attended, x, out, norm, gate_up, down, next_norm, *(() if qkv is None else (qkv,)))
    dtypes = sorted({str(array.dtype) for array in arrays})
    require(len(dtypes) == 1, f"inputs in {' and '.join(dtypes)}", "one dtype")
    fused = 0 if qkv is None else qkv.shape[1]
    tokens, attended_size = attended.shape
    shape = ChainShape(tokens, attended_size, x.shape[1], down.shape[0], fused)
    check(shape, x.dtype, pairs)
    return shape


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
