"""Parses the text of a kernel into instructions, and keeps names of inner blocks apart."""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from ptx.refusal import require

SKIPPED = re.compile(r"^\s*\.(loc|file|section)\b.*$|//.*$", re.MULTILINE)
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
LABEL = re.compile(r"([$\w]+)\s*:(?!:)")
INSTRUCTION = re.compile(r"(?:@(!?)([$%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)")
NAME = re.compile(r"(?<![\w$%.:])[$%A-Za-z_][\w$%]*(?![\w$%@])")
SPACE = re.compile(r"\s*")
ALIGNMENT = 1024
"""Alignment of variables in shared memory, as on a GPU."""


class Instruction(NamedTuple):
    op: str
    """The name with its modifiers, such as `ld.global.v2.b16`."""
    operands: tuple[str, ...]
    predicate: str | None = None
    unless: bool = False
    """Whether it runs if the predicate is false."""

    def __str__(self) -> str:
        when = f"@{'!' * self.unless}{self.predicate} " if self.predicate else ""
        return f"{when}{self.op} {', '.join(self.operands)}"


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    parameters: dict[str, int]
    """The size of each parameter in bytes, in order."""
    registers: dict[str, int]
    """The width in bits of each register, by name; for a family such as %r<9>, by its prefix."""
    shared: dict[str, int]
    """Where the variables in shared memory begin."""
    code: tuple[Instruction, ...]
    labels: dict[str, int]

    def width(self, register: str) -> int | None:
        """The width of a register in bits; None if this is no register."""
        found = self.registers.get(register)
        return self.registers.get(register.rstrip("0123456789")) if found is None else found


def kernels(text: str) -> list[Kernel]:
    text = SKIPPED.sub("", text)
    return [kernel_at(text, found) for found in ENTRY.finditer(text)]


def kernel_at(text: str, found: re.Match) -> Kernel:
    end = text.index("\n)", found.end())
    parameters = dict(parameter(line) for line in text[found.end() : end].split(",\n"))
    reader = Reader()
    for statement in statements(text[text.index("{", end) + 1 :]):
        reader.take(statement)
    made = reader.registers, reader.shared, tuple(reader.code), reader.labels
    return Kernel(found[1], parameters, *made)


def parameter(line: str) -> tuple[str, int]:
    """Name and size of `.param .u64 .ptr .align 256 name` or `.param .align 64 .b8 name[128]`."""
    found = re.search(r"([\w$]+)(?:\[(\d+)\])?$", line.strip())
    assert found, line
    bits = re.findall(r"\.[busf](\d+)\b", line)[0]
    return found[1], int(bits) // 8 * int(found[2] or 1)


def statements(body: str) -> Iterator[str]:
    """Statements without their semicolon, labels with their colon, and the braces of blocks, up to
    the brace that ends the kernel."""
    at, depth = 0, 1
    while depth:
        at = end_of(SPACE, body, at)
        label = LABEL.match(body, at)
        if body[at] in "{}":
            depth += 1 if body[at] == "{" else -1
            end = at + 1
        else:
            end = label.end() if label else body.index(";", at) + 1
        yield " ".join(body[at:end].rstrip(";").split())
        at = end


def end_of(pattern: re.Pattern, text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


class Reader:
    """Takes statements one by one. A name that an inner block declares gets the block's number."""

    def __init__(self) -> None:
        self.registers: dict[str, int] = {}
        self.shared: dict[str, int] = {}
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.open: list[tuple[int, int, set[str]]] = []
        """The number of each open block, where its code begins, and the names that it declares."""
        self.opened = 0

    def take(self, statement: str) -> None:
        if statement == "{":
            self.opened += 1
            self.open.append((self.opened, len(self.code), set()))
        elif statement == "}":
            self.close()
        elif statement.endswith(":"):
            self.labels[self.declared(statement[:-1].strip())] = len(self.code)
        elif statement.startswith(".reg"):
            self.declare(statement)
        elif statement.startswith(".shared"):
            self.share(statement)
        elif statement and not statement.startswith(".pragma"):
            self.code.append(instruction(statement))

    def declared(self, name: str) -> str:
        if not self.open:
            return name
        self.open[-1][2].add(name)
        return f"{name}@{self.open[-1][0]}"

    def declare(self, statement: str) -> None:
        kind, names = statement.removeprefix(".reg").strip().lstrip(".").split(None, 1)
        width = 1 if kind == "pred" else int(kind.lstrip("busf"))
        for name in names.split(","):
            self.registers[self.declared(name.split("<")[0].strip())] = width

    def share(self, statement: str) -> None:
        require(not self.shared, f"a second variable in shared memory: {statement}")
        self.shared[statement.split()[-1].split("[")[0]] = ALIGNMENT

    def close(self) -> None:
        """Ends a block and renames its own registers and labels in its instructions, unless the
        brace ends the kernel."""
        if self.open:
            block, begun, own = self.open.pop()
            new = lambda m: f"{m[0]}@{block}" if m[0] in own else m[0]
            renamed = lambda text: text and NAME.sub(new, text)
            for i, one in enumerate(self.code[begun:], begun):
                operands = tuple(map(renamed, one.operands))
                self.code[i] = one._replace(operands=operands, predicate=renamed(one.predicate))


def instruction(statement: str) -> Instruction:
    found = INSTRUCTION.fullmatch(statement)
    require(found, f"the statement {statement!r}")
    assert found
    return Instruction(found[3], split(found[4]), found[2], found[1] == "!")


def split(operands: str) -> tuple[str, ...]:
    """Splits operands at the commas outside of brackets and braces."""
    parts, depth, begun = [], 0, 0
    for i, letter in enumerate(operands):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            parts.append(operands[begun:i])
            begun = i + 1
    return tuple(part.strip() for part in (*parts, operands[begun:]) if part.strip())
