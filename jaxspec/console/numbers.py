"""Lists of numbers in a flag's text."""

from jaxspec.errors import UsageError


def integers(flag: str, text: str) -> list[int]:
    """1,4,16: positive, each once, rising."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}; expected integers, commas between") from error
    if numbers[0] < 1:
        raise UsageError(f"{flag} {text!r}; expected at least 1")
    return numbers


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """0.9,0.5"""
    return tuple(_number(flag, text, part) for part in text.split(","))


def named_numbers(flag: str, text: str) -> dict[str, float]:
    """GSM8K=6.54,MATH-500=7.87; of several, one without a name is called by its number, and one
    that is alone by nothing."""
    named = [part.rpartition("=")[::2] for part in text.split(",")]
    if len(named) > 1:
        named = [(name or number, number) for name, number in named]
    return {name: _number(flag, text, number) for name, number in named}


def _number(flag: str, text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}; expected numbers, commas between") from error
