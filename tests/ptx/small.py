"""Small kernels for tests of single instructions."""

import numpy as np

from ptx.host import Launch, OfArray
from ptx.parse import kernels
from ptx.run import run

HEAD = """
.version 9.0
.target sm_90a
.visible .entry small(
{parameters}
)
.maxntid {threads}, 1, 1
{{
	.reg .pred %p<20>;
	.reg .b16 %rs<20>;
	.reg .b32 %r<40>;
	.reg .b64 %rd<40>;
	.shared .align 16 .b8 held[4096];
"""
ENTER = """
	ld.param.b64 %rd{number}, [p{i}];
"""
FIRST = 30
"""Number of the register with the first array's address. %r30 is the thread, %r31 four times it."""
THREAD = """
	mov.u32 %r30, %tid.x;
	shl.b32 %r31, %r30, 2;
	cvt.u64.u32 %rd20, %r31;
"""


def ran(body: str, *arrays: np.ndarray, threads: int = 32, descriptors=None) -> None:
    """Runs instructions in one thread block. The address of array i is in %rd30, %rd31 and so on,
    moved on by four bytes per thread in %rd0, %rd1 and so on."""
    names = [f"\t.param .u64 .ptr .align 256 p{i}" for i in range(len(arrays))]
    given: list = [OfArray(i) for i in range(len(arrays))]
    if descriptors:
        names.append("\t.param .align 64 .b8 boxes[128]")
        given.append(descriptors)
    text = HEAD.format(parameters=",\n".join(names), threads=threads) + THREAD
    for i in range(len(arrays)):
        text += ENTER.format(number=FIRST + i, i=i)
        text += f"\tadd.s64 %rd{i}, %rd{FIRST + i}, %rd20;\n"
    launch = Launch((1, 1, 1), (0, 0, 0), threads, 4096, tuple(given))
    run(kernels(f"{text}{body}\n\tret;\n}}\n")[0], launch, arrays)


def computed(instruction: str, *given: np.ndarray) -> np.ndarray:
    """The result of an instruction in %r0, with array i in %r(i + 1)."""
    loads = "".join(f"ld.global.b32 %r{i + 1}, [%rd{i + 1}];\n" for i in range(len(given)))
    result = np.zeros(32, np.uint32)
    wide = [np.ascontiguousarray(one).view(np.uint32) for one in given]
    ran(f"{loads}{instruction}\nst.global.b32 [%rd0], %r0;", result, *wide)
    return result
