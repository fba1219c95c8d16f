"""Compiles a function that calls a kernel for an H100, and runs the kernel's PTX on the CPU."""

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from h100 import compiled, placed

from ptx.host import Launch, launch_of
from ptx.memory import POISON
from ptx.parse import Kernel, kernels
from ptx.refusal import require
from ptx.run import run

DUMPS = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_HOST_LLVM")
TARGET = '"mosaic_gpu_v2"'
DTYPES = {"i32": "int32", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
DTYPES |= {"f8E4M3FN": "float8_e4m3fn", "ui32": "uint32", "i8": "int8"}


@dataclasses.dataclass(frozen=True)
class OnPtx:
    """A compiled function of arrays that calls one kernel, and otherwise only reshapes."""

    kernel: Kernel
    launch: Launch
    program: Any
    """The module of MLIR to which jax lowers the function."""
    returned: Any
    """The structure of what it returns."""

    def __call__(self, *given: Any, blocks: range | None = None) -> Any:
        """Calls the function. Only the thread blocks in `blocks` run. What is not written is
        NaN."""
        arrays = [np.array(one) for one in jax.tree.leaves(given)]
        return jax.tree.unflatten(self.returned, self.call("main", arrays, blocks))

    def call(self, name: str, arrays: list, blocks: range | None) -> list:
        body = function_of(self.program, name).regions[0].blocks[0]
        values = dict(zip(body.arguments, arrays))
        for op in body.operations:
            read = [values[operand] for operand in op.operands]
            if op.operation.name == "func.return":
                return read
            values |= zip(op.results, self.results(op.operation, read, blocks))
        raise AssertionError(f"{name} returns nothing")

    def results(self, op: Any, read: list, blocks: range | None) -> list:
        if op.name == "func.call":
            return self.call(str(op.attributes["callee"]).removeprefix("@"), read, blocks)
        if op.name == "stablehlo.reshape":
            return [read[0].reshape(op.results[0].type.shape)]
        called = op.name == "stablehlo.custom_call" and str(op.attributes["call_target_name"])
        require(called == TARGET, f"{op.name} {called or ''} beside a kernel")
        aliases = aliases_of(op)
        made = [
            read[aliases[i]] if i in aliases else unwritten(one.type)
            for i, one in enumerate(op.results)
        ]
        run(self.kernel, self.launch, [*read, *made], blocks)
        return made


def function_of(program: Any, name: str) -> Any:
    named = {str(op.attributes["sym_name"]).strip('"'): op for op in program.body.operations}
    return named[name]


def aliases_of(call: Any) -> dict[int, int]:
    """For each result that is written in place, the operand whose memory it uses."""
    found = {}
    for alias in call.attributes["output_operand_aliases"]:
        result = re.search(r"output_tuple_indices = \[(\d*)\]", str(alias))
        operand = re.search(r"operand_index = (\d+)", str(alias))
        assert result and operand, alias
        found[int(result[1] or 0)] = int(operand[1])
    return found


def unwritten(kind: Any) -> np.ndarray:
    made = np.empty(kind.shape, jnp.dtype(DTYPES[str(kind.element_type)]))
    made.reshape(-1).view(np.uint8)[:] = POISON
    return made


def on_ptx(function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> OnPtx:
    """The function, compiled for arrays of these shapes."""
    made = jax.jit(function, donate_argnums=donate)
    lowered = made.lower(*placed(shapes))
    with dumped() as text:
        compiled(lowered)
    found = kernels(text())
    require(len(found) == 1, f"{len(found)} kernels in one function")
    program = lowered.compiler_ir("stablehlo")
    returned = jax.tree.structure(jax.eval_shape(function, *shapes))
    return OnPtx(found[0], launch_of(text()), program, returned)


@contextlib.contextmanager
def dumped() -> Iterator[Callable[[], str]]:
    """Yields a function that returns what the compiler has printed: PTX and the host's program."""
    before = {name: os.environ.get(name) for name in DUMPS}
    os.environ |= dict.fromkeys(DUMPS, "1")
    printed: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: printed[0]
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        file.seek(0)
        printed.append(file.read())
