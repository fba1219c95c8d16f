"""Lists of numbers in flags."""

import pytest
from jaxspec.console.flags import integers, named_numbers, numbers

from jaxspec.errors import UsageError


def test_integers_come_once_and_rising():
    assert integers("--at", "4,1,4") == [1, 4]


def test_numbers_keep_their_order():
    assert numbers("--rates", "0.5,1,0") == (0.5, 1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("4", {"": 4.0}),
        ("GSM8K=6.5", {"GSM8K": 6.5}),
        ("GSM8K=6.5,7", {"GSM8K": 6.5, "7": 7.0}),
        ("a=b=2", {"a=b": 2.0}),
    ],
)
def test_numbers_may_have_names(text, found):
    assert named_numbers("--lengths", text) == found


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (integers, "1,", "expected integers"),
        (integers, "0,3", "expected at least 1"),
        (numbers, "1,x", "expected numbers"),
        (named_numbers, "a=", "expected numbers"),
    ],
)
def test_what_is_none(read, text, said):
    with pytest.raises(UsageError, match=f"--flag '{text}'; {said}"):
        read("--flag", text)
