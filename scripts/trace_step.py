"""What the host runs for one warm decode step: the files, the functions, and their lines.

    python scripts/trace_step.py

Runs the demo pair with one request, and follows every call within the package during one step of
the overlapped driver whose programs have been compiled. A function counts once, with all its lines.
"""

import argparse
import dataclasses
import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jaxspec
from jaxspec import cli

PACKAGE = Path(jaxspec.__file__).parent
WARM_STEPS = 6


@dataclasses.dataclass
class Walk:
    """The functions of the package that ran, in the order in which they were first called."""

    functions: dict[CodeType, int] = dataclasses.field(default_factory=dict)
    """By code object, the number of lines."""

    def follow(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self.functions or not is_named_function(code):
            return
        self.functions[code] = len(inspect.getsourcelines(code)[0])

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file_of(code) for code in self.functions))

    @property
    def lines(self) -> int:
        return sum(self.functions.values())


def is_named_function(code: CodeType) -> bool:
    """Whether code is a function with a name and a file. Generated methods have no file, and
    lambdas and comprehensions are lines of their function."""
    return code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<")


def file_of(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(PACKAGE))


def walk_one_step() -> Walk:
    engine = jaxspec.Engine.from_pretrained(*jaxspec.demo_pair(), driver="overlapped", max_batch=1)
    stream = engine.stream("def quicksort(", jaxspec.SamplingParams(max_tokens=120))
    for _ in range(WARM_STEPS):
        next(stream)
    walk = Walk()
    sys.setprofile(walk.follow)
    try:
        next(stream)
    finally:
        sys.setprofile(None)
    stream.close()
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.parse_args()
    walk = walk_one_step()
    for name in walk.files:
        functions = [(code, n) for code, n in walk.functions.items() if file_of(code) == name]
        print(f"{sum(n for _, n in functions):4} lines  {name}")
        for code, lines in functions:
            print(f"{lines:10}  {code.co_qualname}")
    print(f"{len(walk.files)} files, {len(walk.functions)} functions, {walk.lines} lines")


if __name__ == "__main__":
    sys.exit(cli.run(main))
