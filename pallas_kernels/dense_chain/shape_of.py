"""The shape of a call from its arguments."""

from jaxtyping import Float

from pallas_kernels.dense_chain.checks import check
from pallas_kernels.dense_chain.shape import PAIRS, Arrivals, ChainShape, Scaled
from pallas_kernels.fp8_product import BLOCK, E4M3, Fp8Matrix, RoundedRows
from pallas_kernels.refusal import require
from pallas_kernels.tiles import Shapes

AnyMatrix = Float[Shapes, "inputs outputs"] | Fp8Matrix


def shape_of(
    attended: Float[Shapes, "tokens attended"] | RoundedRows,
    x: Float[Shapes, "tokens hidden"],
    out: Float[Shapes, "attended hidden"] | Fp8Matrix,
    norm: Float[Shapes, " hidden"],
    gate_up: Float[Shapes, "hidden twice_inner"] | Fp8Matrix,
    down: Float[Shapes, "inner hidden"] | Fp8Matrix,
    next_norm: Float[Shapes, " hidden"],
    qkv: Float[Shapes, "hidden fused"] | Fp8Matrix | None,
    arrivals: Arrivals,
    *,
    eps: float,
    quantise_inputs: bool = False,
    pairs: int = PAIRS,
) -> ChainShape:
    """The shape of this call; raises `NotForThisKernel` if the kernel cannot do it."""
    matrices = [out, gate_up, down, *(() if qkv is None else (qkv,))]
    in_8_bits = [matrix for matrix in matrices if isinstance(matrix, Fp8Matrix)]
    others = [matrix for matrix in matrices if not isinstance(matrix, Fp8Matrix)]
    dtypes = sorted({str(array.dtype) for array in (attended, x, *others)})
    require(len(dtypes) == 1, f"inputs in {' and '.join(dtypes)}", "one dtype")
    norms = sorted({str(scale.dtype) for scale in (norm, next_norm)})
    require(len(norms) == 1, f"norm scales in {' and '.join(norms)}", "one dtype")
    require(not (in_8_bits and others), "some matrices in 8 bits", "all or none")
    fused = 0 if qkv is None else sides(qkv)[1]
    in_rows = isinstance(attended, RoundedRows)
    require(quantise_inputs or not in_rows, "activations in 8 bits", "16 bits")
    tokens, attended_size = attended.numbers.shape if in_rows else attended.shape
    sizes = tokens, attended_size, x.shape[1], sides(down)[0], fused
    shape = ChainShape(
        *sizes,
        scaled=scaled(in_8_bits) if in_8_bits else None,
        quantised_inputs=quantise_inputs,
        attended_in_8_bits=in_rows,
        norm_dtype=None if norms == dtypes else norms[0],
    )
    check(shape, x.dtype, pairs)
    return shape


def sides(matrix: AnyMatrix) -> tuple[int, int]:
    """Inputs and outputs."""
    if isinstance(matrix, Fp8Matrix):
        outputs, inputs = matrix.weight.shape
        return inputs, outputs
    inputs, outputs = matrix.shape
    return inputs, outputs


def scaled(matrices: list[Fp8Matrix]) -> Scaled:
    """What the scales of these matrices belong to."""
    first, *others = map(scaled_of, matrices)
    require(all(kind == first for kind in others), "scales of blocks and of outputs", "one kind")
    return first


def scaled_of(matrix: Fp8Matrix) -> Scaled:
    weight, scales = matrix
    require(weight.dtype == E4M3, f"a matrix in {weight.dtype}", f"16 bits or {E4M3.name}")
    require(scales.dtype == "float32", f"scales in {scales.dtype}", "float32")
    outputs, inputs = weight.shape
    of_blocks, of_outputs = (outputs // BLOCK, inputs // BLOCK), (outputs, 1)
    known = scales.shape in (of_blocks, of_outputs)
    require(known, f"scales of shape {scales.shape}", f"{of_blocks} or {of_outputs}")
    return "blocks" if scales.shape == of_blocks else "outputs"
