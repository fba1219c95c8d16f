"""Instructions of single lanes against numpy."""

import numpy as np
import pytest

from ptx.refusal import Refused, WrongAccess
from ptx.small import computed, ran

DRAW = np.random.default_rng(0)
INTEGERS = [DRAW.integers(0, 2**32, 32, np.uint32) for _ in range(3)]
FLOATS = [DRAW.normal(size=32).astype(np.float32) for _ in range(3)]
A, B, C = INTEGERS


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 %r0, %r1, %r2;", A + B),
        ("sub.s32 %r0, %r1, 7;", A - np.uint32(7)),
        ("mul.lo.s32 %r0, %r1, %r2;", A * B),
        ("mul.hi.u32 %r0, %r1, %r2;", (A.astype(np.uint64) * B >> np.uint64(32)).astype(np.uint32)),
        ("mad.lo.s32 %r0, %r1, %r2, %r3;", A * B + C),
        ("shl.b32 %r0, %r1, 35;", np.zeros(32, np.uint32)),
        ("shr.u32 %r0, %r1, 5;", A >> 5),
        ("shr.s32 %r0, %r1, 40;", (A.view(np.int32) >> 31).view(np.uint32)),
        ("bfe.u32 %r0, %r1, 3, 4;", A >> 3 & 15),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0x96;", A ^ B ^ C),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0xCA;", A & B | ~A & C),
        ("shf.l.wrap.b32 %r0, %r1, %r2, 8;", B << 8 | A >> 24),
        ("shf.r.wrap.b32 %r0, %r1, %r2, 8;", B << 24 | A >> 8),
        ("prmt.b32 %r0, %r1, %r2, 0x5410;", A & 0xFFFF | B << 16),
        ("prmt.b32 %r0, %r1, %r2, 0x9990;", np.where(A >> 15 & 1, 0xFFFFFF00, 0) | A & 0xFF),
        ("min.s32 %r0, %r1, %r2;", np.minimum(A.view(np.int32), B.view(np.int32)).view(np.uint32)),
    ],
)
def test_integers(instruction: str, expected: np.ndarray):
    np.testing.assert_array_equal(computed(instruction, *INTEGERS), expected)


X, Y, Z = FLOATS
WIDE = X.astype(np.float64) * Y + Z


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.f32 %r0, %r1, %r2;", X + Y),
        ("fma.rn.f32 %r0, %r1, %r2, %r3;", WIDE.astype(np.float32)),
        ("mul.f32 %r0, %r1, 0f40000000;", X * 2),
        ("neg.f32 %r0, %r1;", -X),
        ("max.NaN.f32 %r0, %r1, %r2;", np.maximum(X, Y)),
        ("cvt.sat.f32.f32 %r0, %r1;", np.clip(X, 0, 1)),
        ("ex2.approx.ftz.f32 %r0, %r1;", np.exp2(X)),
    ],
)
def test_floats(instruction: str, expected: np.ndarray):
    found = computed(instruction, *FLOATS).view(np.float32)
    np.testing.assert_array_max_ulp(found, expected, 1)


def test_a_sum_that_is_rounded_down_is_the_largest_float_below_it():
    found = computed("fma.rm.f32 %r0, %r1, %r2, %r3;", *FLOATS).view(np.float32)
    assert (found <= WIDE).all() and (np.nextafter(found, np.float32(np.inf)) > WIDE).all()


def test_what_is_not_a_number_loses_against_a_number_unless_it_is_asked_for():
    with_nan = np.where(np.arange(32) % 2, np.nan, X).astype(np.float32)
    loses = computed("max.f32 %r0, %r1, %r2;", with_nan, Y).view(np.float32)
    wins = computed("max.NaN.f32 %r0, %r1, %r2;", with_nan, Y).view(np.float32)
    np.testing.assert_array_equal(loses, np.fmax(with_nan, Y))
    assert np.isnan(wins[1::2]).all() and not np.isnan(wins[::2]).any()


@pytest.mark.parametrize(("compare", "of_nan"), [("lt", 0), ("ne", 0), ("neu", 1), ("geu", 1)])
def test_comparisons_with_what_is_not_a_number(compare: str, of_nan: int):
    body = f"setp.{compare}.f32 %p1, %r1, %r2; selp.b32 %r0, 1, 0, %p1;"
    nan = np.full(32, np.nan, np.float32)
    assert (computed(body, nan, Y) == of_nan).all()


def test_pairs_are_rounded_to_even_with_the_first_in_the_upper_half():
    import ml_dtypes

    pair = computed("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", X, Y)
    halves = pair.view(ml_dtypes.bfloat16).reshape(32, 2)
    np.testing.assert_array_equal(halves[:, 1], X.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(halves[:, 0], Y.astype(ml_dtypes.bfloat16))


def test_a_predicate_leaves_the_other_lanes_as_they_were():
    body = "mov.b32 %r0, 5; setp.lt.u32 %p1, %r30, 3; @!%p1 mov.b32 %r0, 6;"
    np.testing.assert_array_equal(computed(body, A), np.where(np.arange(32) < 3, 5, 6))


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("popc.b32 %r0, %r30;", Refused, "popc"),
        ("add.f32.odd %r0, %r30, %r30;", Refused, "odd"),
        ("add.rn.xyz.f32 %r0, %r30, %r30;", Refused, "xyz"),
        ("add.s32 %r0, %r30, %r7;", WrongAccess, "%r7 is read before it is written"),
        ("ld.global.b32 %r0, [%rd30+128];", WrongAccess, "4 bytes at 128 of array 0"),
        ("ld.global.b64 %rd9, [%rd30+4];", WrongAccess, "8 bytes at 4"),
        ("setp.lt.u32 %p1, %r30, 3; @%p1 bra END; END:", Refused, "do not agree"),
        ("setp.lt.u32 %p1, %r30, 3; @%p1 bar.sync 0, 64;", WrongAccess, "wait for each other"),
    ],
)
def test_what_is_not_known_or_not_right_is_refused(body: str, error: type, said: str):
    with pytest.raises(error, match=said):
        ran(body, np.zeros(32, np.uint32))


def test_names_of_inner_blocks_are_their_own():
    one = "{ .reg .b32 t; mov.b32 t, %r1; add.s32 %r0, t, 1; bra DONE; mov.b32 %r0, 0; DONE: }"
    two = "{ .reg .b32 t; mov.b32 t, %r0; add.s32 %r0, t, 1; bra DONE; mov.b32 %r0, 0; DONE: }"
    np.testing.assert_array_equal(computed(one + two, A), A + 2)
