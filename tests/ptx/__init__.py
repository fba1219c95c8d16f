"""Runs the PTX of a compiled GPU kernel on the CPU, one thread block after the other.

PTX is the code that the compiler makes of a kernel before it is assembled for one GPU. Pallas'
interpreter runs the kernel as it was written. This one runs the result of the compiler: layouts of
registers, swizzles, matrix instructions and bulk copies as the GPU would get them.

    host.py        what the program on the host does: which arrays, grid and copies a kernel gets
    parse.py       the text of a kernel as instructions
    types.py       numbers in registers, and their roundings
    memory.py      global and shared memory, in which what nobody has written is NaN
    state.py       warps and thread blocks
    operands.py    reading and writing what an instruction names
    run.py         runs a kernel on arrays

and the instructions: arithmetic.py, converting.py, moving.py, lanes.py, matrices.py, waiting.py,
copies.py.

It says nothing about time. Unknown instructions, and unknown forms of them, are refused by name,
and so is a branch on which the lanes of a warp do not agree. Sums of a matrix instruction are added
up in float64 and rounded once, and approximations (`ex2.approx`) are exact results, rounded. So a
GPU's results may differ from these in the last bits.
"""
