"""`dense_chain` on Mosaic GPU, for Hopper: four products and what is between them in one kernel.

With few tokens a product takes as long as reading its weights, and between kernels the memory would
be idle. So one thread block stays on each of 132 multiprocessors from the first product to the last
and goes on loading weights, also those of the next product, while it waits for the others:

    weights    out ####### gate, up ################################ down ############ qkv #######
    rows                  ^ wait                                     ^ wait           ^ wait
                          for all blocks                             for all          for all

Each thread block takes tiles of 64 columns (`plan.py`). Two of its four warpgroups multiply
(`kernel.py`, `fp8.py`) and do the epilogues (`rows.py`), one loads weights and one loads rows
(`loading.py`). The two thread blocks of a cluster share the tiles of out and down: each multiplies
half of the inputs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.dense_chain import kernel
from pallas_kernels.dense_chain.fp8 import Fp8Chain
from pallas_kernels.dense_chain.kernel import Chain
from pallas_kernels.dense_chain.loading import SCALES
from pallas_kernels.dense_chain.plan import (
    CONSUMERS,
    PAIR,
    PAIRS,
    Plan,
    Sizes,
    check_device,
    choose_sizes,
)
from pallas_kernels.dense_chain.shape import Arrivals
from pallas_kernels.dense_chain.shape_of import shape_of
from pallas_kernels.fp8_product import Fp8Matrix
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.tiles import named


@kept(static_argnames=("eps", "sizes", "pairs", "interpret"))
def dense_chain(
    attended: Float[Array, "tokens attended"],
    x: Float[Array, "tokens hidden"],
    out: Float[Array, "attended hidden"] | Fp8Matrix,
    norm: Float[Array, " hidden"],
    gate_up: Float[Array, "hidden twice_inner"] | Fp8Matrix,
    down: Float[Array, "inner hidden"] | Fp8Matrix,
    next_norm: Float[Array, " hidden"],
    qkv: Float[Array, "hidden fused"] | Fp8Matrix | None,
    arrivals: Arrivals,
    *,
    eps: float,
    sizes: Sizes | None = None,
    pairs: int = PAIRS,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals]:
    inputs = arrays_by_name(
        {
            "attended": attended,
            "x": x,
            "out": out,
            "norm": norm,
            "gate_up": gate_up,
            "down": down,
            "next_norm": next_norm,
            "qkv": qkv,
        }
    )
    shape = shape_of(
        attended, x, out, norm, gate_up, down, next_norm, qkv, arrivals, eps=eps, pairs=pairs
    )
    plan = Plan(shape, eps, x.dtype, pairs, sizes or choose_sizes(shape), None)
    if interpret is None:
        check_device(dispatch.default_device())
        counters = jax.new_ref(arrivals.counters)
        calls = jnp.full((1,), arrivals.calls + 1, jnp.int32)
        outputs = launch(plan, inputs | {"counters": counters, "calls": calls}, None)
        arrivals = Arrivals(jax.freeze(counters), arrivals.calls + 1)
    else:
        outputs = inputs
        for p in plan.launches:
            outputs = outputs | launch(dataclasses.replace(plan, only=p), outputs, interpret)
    return outputs["total"], outputs.get("next_qkv"), arrivals


def arrays_by_name(
    arguments: dict[str, Float[Array, "..."] | Fp8Matrix | None],
) -> dict[str, Float[Array, "..."]]:
    """The arrays of all arguments, with the scales of 8-bit matrices beside them."""
    found = {}
    for name, argument in arguments.items():
        if isinstance(argument, Fp8Matrix):
            found[name], scales = argument
            found[name + SCALES] = scales[:, 0] if scales.shape[1] == 1 else scales
        elif argument is not None:
            found[name] = argument
    return found


def launch(plan: Plan, inputs: dict[str, jax.Array], interpret) -> dict[str, jax.Array]:
    outputs, kind = plan.outputs(), Fp8Chain if plan.fp8 else Chain
    results = plgpu.kernel(
        named("dense_chain", functools.partial(kernel.run, plan, kind, (*inputs, *outputs))),
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
