"""`dense_chain` on Mosaic GPU, for Hopper: four products and what is between them in one kernel.

With few tokens a product takes as long as reading its weights, and between kernels the memory would
be idle. So one thread block stays on each of 132 multiprocessors from the first product to the last
and goes on loading weights, also those of the next product, while it waits for the others:

    weights    out ####### gate, up ################################ down ############ qkv #######
    rows                  ^ wait                                     ^ wait           ^ wait
                          for all blocks                             for all          for all

Each thread block takes tiles of 64 columns (`plan.py`). Two of its four warpgroups multiply
(`kernel.py`, `fp8.py`, `rounded.py`) and do the epilogues (`rows.py`), one loads weights and one
loads rows (`loading.py`). The two thread blocks of a cluster share the tiles of out and down: each
multiplies half of the inputs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import dispatch
from pallas_kernels.dense_chain import kernel
from pallas_kernels.dense_chain.checks import check_device, check_room
from pallas_kernels.dense_chain.fp8 import Fp8Chain
from pallas_kernels.dense_chain.kernel import Chain
from pallas_kernels.dense_chain.loading import SCALES
from pallas_kernels.dense_chain.phases import NUMBERS, ROW_SCALES
from pallas_kernels.dense_chain.plan import CONSUMERS, PAIR, Plan, Sizes
from pallas_kernels.dense_chain.rounded import RoundedChain
from pallas_kernels.dense_chain.shape import PAIRS, Arrivals
from pallas_kernels.dense_chain.shape_of import shape_of
from pallas_kernels.dense_chain.sizes import choose_sizes
from pallas_kernels.dense_chain.weights import ChainWeights
from pallas_kernels.exchange.inboxes import Inboxes, Layout
from pallas_kernels.fp8_product import Fp8Matrix, RoundedRows
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.tiles import Shapes, named

NAMES = "attended", "x", "out", "norm", "gate_up", "down", "next_norm", "qkv"
"""The arrays and matrices that every call has."""


def dense_chain(
    attended: Float[Array, "tokens attended"] | RoundedRows, *others: Any, **options: Any
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals]:
    if isinstance(attended, RoundedRows):
        return dense_chain_call((attended.numbers, attended.scales), *others, **options)
    return dense_chain_call(attended, *others, **options)


@kept(static_argnames=("eps", "quantise_inputs", "sizes", "pairs", "interpret"))
def dense_chain_call(
    attended: Float[Array, "tokens attended"]
    | tuple[Float[Array, "tokens attended"], Float[Array, "row_tiles pieces size"]],
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
    quantise_inputs: bool = False,
    sizes: Sizes | None = None,
    pairs: int = PAIRS,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals]:
    rows = RoundedRows(*attended, x.dtype) if isinstance(attended, tuple) else attended
    matrices = rows, x, out, norm, gate_up, down, next_norm, qkv
    options = {"eps": eps, "quantise_inputs": quantise_inputs, "pairs": pairs}
    shape = shape_of(*matrices, arrivals, **options)
    plan = Plan(shape, eps, x.dtype, pairs, sizes or choose_sizes(shape), None)
    inputs = arrays_by_name(dict(zip(NAMES, matrices)))
    if interpret is None:
        outputs, arrivals = launch_all(plan, inputs, arrivals)
    else:
        outputs = launch_each(plan, inputs, interpret)
    return outputs["total"], outputs.get("next_qkv"), arrivals


def exchanging_chain(
    attended: Float[Array, "tokens attended"],
    x: Float[Array, "tokens hidden"],
    weights: ChainWeights,
    arrivals: Arrivals,
    inboxes: Inboxes,
    *,
    eps: float,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals, Inboxes]:
    check_exchanging(attended, x, weights, arrivals, inboxes, eps=eps)
    known = inboxes.addresses, inboxes.device, inboxes.calls.reshape(1), inboxes.late
    total, next_qkv, arrivals, exchanges, late = one_exchanging_call(
        attended, x, weights, arrivals, *known, eps=eps, room=inboxes.room
    )
    after = dataclasses.replace(inboxes, calls=exchanges.reshape(()), late=late)
    return total, next_qkv, arrivals, after


@kept(static_argnames=("eps", "room"))
def one_exchanging_call(
    attended: Float[Array, "tokens attended"],
    x: Float[Array, "tokens hidden"],
    weights: ChainWeights,
    arrivals: Arrivals,
    addresses: UInt32[Array, "devices words"],
    device: Int[Array, " here"],
    exchanges: Int[Array, " here"],
    late: Int[Array, " thread_blocks"],
    *,
    eps: float,
    room: int,
) -> tuple[
    Float[Array, "tokens hidden"],
    Float[Array, "tokens fused"] | None,
    Arrivals,
    Int[Array, " here"],
    Int[Array, " thread_blocks"],
]:
    shape = shape_of(attended, x, *weights, arrivals, eps=eps)
    layout = Layout(addresses.shape[0], room)
    plan = Plan(shape, eps, x.dtype, PAIRS, choose_sizes(shape), None, layout)
    lateness = jax.new_ref(late)  # only blocks that waited in vain write to it
    known = {"addresses": addresses, "device": device, "exchanges": exchanges, "late": lateness}
    inputs = arrays_by_name(dict(zip(NAMES, (attended, x, *weights))))
    outputs, arrivals = launch_all(plan, inputs | known, arrivals)
    results = outputs["total"], outputs.get("next_qkv"), arrivals
    return *results, outputs["next_exchanges"], jax.freeze(lateness)


def check_exchanging(
    attended: Float[Shapes, "tokens attended"],
    x: Float[Shapes, "tokens hidden"],
    weights: ChainWeights,
    arrivals: Arrivals,
    inboxes: Inboxes,
    *,
    eps: float,
) -> None:
    """Raises `NotForThisKernel` if the kernel cannot do this call."""
    check_device(dispatch.default_device())
    check_room(shape_of(attended, x, *weights, arrivals, eps=eps), x.dtype, inboxes.layout)


def launch_all(
    plan: Plan, inputs: dict[str, Any], arrivals: Arrivals
) -> tuple[dict[str, jax.Array], Arrivals]:
    """The outputs of all products, computed by one kernel, and the arrivals for the next call."""
    check_device(dispatch.default_device())
    counters = jax.new_ref(arrivals.counters)
    calls = jnp.full((1,), arrivals.calls + 1, jnp.int32)
    outputs = launch(plan, inputs | {"counters": counters, "calls": calls}, None)
    return outputs, Arrivals(jax.freeze(counters), arrivals.calls + 1)


def launch_each(
    plan: Plan, inputs: dict[str, Any], interpret: plgpu.InterpretGPUParams
) -> dict[str, Any]:
    """The same, one product after the other, for the interpreter."""
    outputs = inputs
    for phase in plan.launches:
        outputs = outputs | launch(dataclasses.replace(plan, only=phase), outputs, interpret)
    return outputs


def arrays_by_name(
    arguments: dict[str, Float[Array, "..."] | Fp8Matrix | RoundedRows | None],
) -> dict[str, Float[Array, "..."]]:
    """The arrays of all arguments, with the scales of 8-bit matrices and rows beside them. All
    rows are in one tile."""
    found = {}
    for name, argument in arguments.items():
        if isinstance(argument, RoundedRows):
            found[name + NUMBERS], [found[name + ROW_SCALES]] = argument.numbers, argument.scales
        elif isinstance(argument, Fp8Matrix):
            found[name], scales = argument
            found[name + SCALES] = scales[:, 0] if scales.shape[1] == 1 else scales
        elif argument is not None:
            found[name] = argument
    return found


def launch(plan: Plan, inputs: dict[str, Any], interpret) -> dict[str, jax.Array]:
    outputs = plan.outputs()
    kind = RoundedChain if plan.rounds else Fp8Chain if plan.fp8 else Chain
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
