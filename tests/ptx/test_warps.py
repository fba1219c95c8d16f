"""What lanes and warps do together: shuffles, matrix instructions, barriers and copies, against
what the manual of PTX says of each."""

import ml_dtypes
import numpy as np
import pytest

from ptx.host import Descriptor, OfArray
from ptx.small import computed, ran

LANE = np.arange(32)
DRAW = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("shuffle", "source"),
    [
        ("bfly.b32 %r0, %r1, 4, 31", LANE ^ 4),
        ("idx.b32 %r0, %r1, 3, 31", 0 * LANE + 3),
        ("up.b32 %r0, %r1, 2, 0", np.where(LANE >= 2, LANE - 2, LANE)),
        ("down.b32 %r0, %r1, 1, 6175", np.where(LANE % 8 < 7, LANE + 1, LANE)),
    ],
)
def test_shuffles(shuffle: str, source: np.ndarray):
    """The last is within groups of eight lanes, 0x181f."""
    given = DRAW.integers(0, 2**32, 32, np.uint32)
    np.testing.assert_array_equal(computed(f"shfl.sync.{shuffle}, -1;", given), given[source])


def registers_of(count: int) -> str:
    return ", ".join(f"%r{i}" for i in range(count))


def in_lanes(matrix: np.ndarray, place) -> np.ndarray:
    """Registers of all lanes: number i of lane l is the matrix's at `place(l, i)`, and two of them
    share a register."""
    numbers = [[matrix[place(lane, i)] for i in range(matrix.size // 32)] for lane in range(32)]
    return np.ascontiguousarray(np.array(numbers, matrix.dtype).T.reshape(-1, 2, 32).swapaxes(1, 2))


def test_a_matrix_instruction():
    """Places as the manual has them for mma.m16n8k16 with bfloat16."""
    bf16 = ml_dtypes.bfloat16
    left, right = DRAW.normal(size=(16, 16)).astype(bf16), DRAW.normal(size=(16, 8)).astype(bf16)
    sums = DRAW.normal(size=(16, 8)).astype(np.float32)
    of_left = lambda lane, i: (lane // 4 + 8 * (i // 2 % 2), lane % 4 * 2 + i % 2 + 8 * (i // 4))
    of_right = lambda lane, i: (lane % 4 * 2 + i % 2 + 8 * (i // 2), lane // 4)
    of_sums = lambda lane, i: (lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2)
    a, b = (in_lanes(m, p).view(np.uint32)[..., 0] for m, p in ((left, of_left), (right, of_right)))
    c = np.array([[sums[of_sums(lane, i)] for lane in LANE] for i in range(4)])
    given = np.concatenate([a, b, c.view(np.uint32)])
    result = np.zeros((4, 32), np.float32)
    loads = "".join(f"ld.global.b32 %r{i}, [%rd1+{128 * i}];" for i in range(10))
    ran(
        loads + "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r10,%r11,%r12,%r13}, "
        "{%r0,%r1,%r2,%r3}, {%r4,%r5}, {%r6,%r7,%r8,%r9};"
        + "".join(f"st.global.b32 [%rd0+{128 * i}], %r{10 + i};" for i in range(4)),
        result,
        given,
    )
    found = np.zeros((16, 8), np.float32)
    for lane in LANE:
        for i in range(4):
            found[of_sums(lane, i)] = result[i, lane]
    expected = sums + left.astype(np.float64) @ right.astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_loads_of_matrices(transposed: str):
    """Lane l gets numbers 2 (l % 4) and the next one of row l // 4, or of that column."""
    matrices = DRAW.integers(0, 2**16, (2, 8, 8), np.uint16)
    result = np.zeros((2, 32), np.uint32)
    ran(
        "ld.global.b64 %rd9, [%rd31]; mov.b64 %rd10, held;"
        "shl.b32 %r2, %r30, 4; cvt.u64.u32 %rd11, %r2; add.s64 %rd12, %rd11, %rd10;"
        "and.b32 %r3, %r30, 15; shl.b32 %r3, %r3, 4; cvt.u64.u32 %rd13, %r3;"
        "add.s64 %rd14, %rd31, %rd13; add.s64 %rd15, %rd13, %rd10;"
        "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd14];"
        "st.shared.v4.b32 [%rd15], {%r4, %r5, %r6, %r7};"
        f"ldmatrix.sync.aligned.m8n8.x2{transposed}.shared.b16 {{%r8, %r9}}, [%rd12];"
        "st.global.b32 [%rd0], %r8; st.global.b32 [%rd0+128], %r9;",
        result,
        matrices,
    )
    expected = matrices.mT if transposed else matrices
    pairs = result.view(np.uint16).reshape(2, 32, 2)
    for lane in LANE:
        columns = slice(lane % 4 * 2, lane % 4 * 2 + 2)
        np.testing.assert_array_equal(pairs[:, lane], expected[:, lane // 4, columns])


def test_stores_of_matrices_are_the_reverse_of_loads():
    given, result = DRAW.integers(0, 2**32, 32, np.uint32), np.zeros(32, np.uint32)
    ran(
        "ld.global.b32 %r1, [%rd1]; mov.b64 %rd10, held; shl.b32 %r2, %r30, 4;"
        "cvt.u64.u32 %rd11, %r2; add.s64 %rd12, %rd11, %rd10;"
        "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%rd12], {%r1};"
        "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r0}, [%rd12];"
        "st.global.b32 [%rd0], %r0;",
        result,
        given,
    )
    np.testing.assert_array_equal(result, given)


def test_warps_wait_at_a_barrier_for_what_the_others_store():
    """Each thread reads what the thread of the other warp wrote."""
    result = np.zeros(64, np.uint32)
    ran(
        "mov.b64 %rd10, held; add.s64 %rd11, %rd10, %rd20; st.shared.b32 [%rd11], %r30;"
        "bar.sync 0; xor.b32 %r2, %r31, 128; cvt.u64.u32 %rd12, %r2; add.s64 %rd13, %rd12, %rd10;"
        "ld.shared.b32 %r3, [%rd13]; st.global.b32 [%rd0], %r3;",
        result,
        threads=64,
    )
    np.testing.assert_array_equal(result, np.arange(64) ^ 32)


WAIT = (
    "{ .reg .pred P1; AGAIN: mbarrier.try_wait.parity.shared.b64 P1, [%r10], 0, 10000;"
    "@P1 bra.uni DONE; bra.uni AGAIN; DONE: }"
)
BEGIN = (
    "mov.b64 %rd10, held; cvt.u32.u64 %r9, %rd10; add.s32 %r10, %r9, 4000; elect.sync %r1|%p1, -1;"
    "@%p1 mbarrier.init.shared::cta.b64 [%r10], 1;"
    "@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r10], {bytes};"
)
READ = "add.s64 %rd11, %rd10, %rd20; ld.shared.b32 %r4, [%rd11]; st.global.b32 [%rd0], %r4;"


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_copy_brings_is_there_once_it_is_awaited(waits: bool):
    given, result = DRAW.integers(0, 2**31, 32, np.uint32), np.zeros(32, np.uint32)
    copy = (
        "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%r9], [%rd31], 128, [%r10];"
    )
    ran(BEGIN.replace("{bytes}", "128") + copy + WAIT * waits + READ, result, given)
    np.testing.assert_array_equal(result, given if waits else np.full(32, 2**32 - 1))


def test_a_box_of_a_tensor_is_swizzled_and_zero_beyond_the_end():
    """Rows 3 and 4 of four: the second one does not exist. Of 128 bytes each, so the second is
    swizzled by one piece of 16 bytes."""
    given = DRAW.integers(1, 2**31, (4, 32), np.uint32)
    first, second = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    box = Descriptor(OfArray(2), 32, (4, 32), (32, 1), (2, 32), 128)
    copy = (
        "mov.b64 %rd8, boxes; @%p1 cp.async.bulk.tensor.2d.shared::cluster.global."
        "mbarrier::complete_tx::bytes [%r9], [%rd8, {0, {row}}], [%r10];"
    )
    read = "ld.shared.b32 %r5, [%rd11+128]; st.global.b32 [%rd1], %r5;"
    begin = BEGIN.replace("{bytes}", "256")
    rows = lambda row: ran(
        begin + copy.replace("{row}", str(row)) + WAIT + READ + read,
        first, second, given, descriptors={0: box},
    )  # fmt: skip
    rows(1)
    np.testing.assert_array_equal(first, given[1])
    np.testing.assert_array_equal(second, given[2][LANE ^ 4])
    rows(3)
    np.testing.assert_array_equal(first, given[3])
    assert not second.any()
