"""Compiles the portable kernels for the GPU named on the command line: one GPU per process, because
compiled kernels are kept for the first."""

import functools
import sys

import jax
from h100 import compiled, placed
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from test_add_norm import inputs as sums
from test_compiled import attention_arguments, write_arguments
from test_gated_delta_kernels import FOLD, PREFILL, READ, chosen, drawn
from test_mixer_kernels import FOLD as MIXER_FOLD
from test_mixer_kernels import READ as MIXER_READ
from test_mixer_kernels import drawn as drawn_projection

from pallas_kernels.add_norm import mosaic as add_norm
from pallas_kernels.gated_delta import mosaic as gated_delta
from pallas_kernels.paged_attention import portable
from pallas_kernels.qkv_write import mosaic as qkv_write

GPUS = {
    "a100": (8, 0),
    "l40s": (8, 9),
    "h100": (9, 0),
    "b200": (10, 0),
    "rtx6000pro": (12, 0),
}

OF_DRAFTER = {"causal": False, "window": 2048, "window_of_block": True}


def calls() -> list[tuple]:
    attention = functools.partial(portable.paged_attention, causal=True, window=None)
    writing = lambda *given: qkv_write.qkv_write(*given, eps=1e-6, bulk=False)
    adding = functools.partial(add_norm.add_norm, eps=1e-6)
    of_delta = jax.eval_shape(lambda: drawn(key_heads=16, value_heads=32, width=16))
    of_long = jax.eval_shape(lambda: drawn(key_heads=16, value_heads=32, width=500))
    projected = jax.eval_shape(lambda: drawn_projection(key_heads=16, value_heads=32, width=16))
    return [
        (attention, attention_arguments(8, 16)),
        (functools.partial(attention, splits=1), attention_arguments(8, 16)),
        (functools.partial(attention, window=2048), attention_arguments(1, 16)),
        (functools.partial(attention, **OF_DRAFTER), attention_arguments(1, 16)),
        (attention, attention_arguments(1, 1, group=5, head_dim=64)),
        (writing, write_arguments(1, 16)),
        (adding, jax.eval_shape(lambda: sums((16, 4096), "bfloat16", 4))),
        (gated_delta.delta_read, chosen(of_delta, READ)),
        (gated_delta.delta_fold, chosen(of_delta, FOLD)),
        (gated_delta.delta_prefill, chosen(of_long, PREFILL)),
        (gated_delta.mixer_read, chosen(projected, MIXER_READ)),
        (gated_delta.mixer_fold, chosen(projected, MIXER_FOLD)),
    ]


if __name__ == "__main__":
    gpu = sys.argv[1]
    mosaic_utils._infer_arch = lambda: GPUS[gpu]
    for function, arguments in calls():
        program = compiled(jax.jit(function).lower(*placed(arguments, gpu)))
        print("compiled" if "mosaic_gpu" in program.as_text() else "no kernel in it")
