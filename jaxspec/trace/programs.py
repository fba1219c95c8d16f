"""Facts about compiled programs: their texts, their memory use, the scopes of instructions."""

import re
from typing import Any

import jax

from jaxspec.console.files import make_folder, write_json
from jaxspec.engine.engine import Engine

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"")


def op_names_of(hlo: str) -> dict[str, Any]:
    """The op_name of every instruction of a compiled program: the path of scopes it came from."""
    matches = filter(None, map(INSTRUCTION.match, hlo.splitlines()))
    module = hlo.split(None, 2)[1].rstrip(",")
    return {"module": module, "op_names": {match[1]: match[2] for match in matches}}


def hlo_of(program: jax.stages.Compiled) -> str:
    text = program.as_text()
    assert text is not None, "this backend does not provide the text of its programs"
    return text


def dump_programs(engine: Engine, folder: str, draws: bool) -> list[dict[str, Any]]:
    """Writes the HLO and the memory use of every step program that the engine can need."""
    place, sizes = make_folder(folder), []
    for number, program in enumerate(engine.programs(draws)):
        compiled = program.lowered.compile()
        name = f"{number:02d}-{program.name}"
        (place / f"{name}.hlo.txt").write_text(hlo_of(compiled))
        shapes = [str(leaf.shape) for leaf in jax.tree.leaves(program.inputs)]
        sizes.append({"program": name, "inputs": shapes, **_memory_of(compiled)})
    write_json(place / "memory.json", sizes)
    return sizes


def _memory_of(program: jax.stages.Compiled) -> dict[str, int]:
    memory = program.memory_analysis()
    assert memory is not None, "this backend does not report the sizes of its programs"
    return {
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }
