"""Which phase of a step and which part of a model an instruction comes from."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jaxspec.trace.events import Event

PHASES = ("prefill", "draft", "verify", "accept", "commit")
PARTS = (
    "qkv",
    "qkv_write",
    "attention_out",
    "gate_up",
    "down",
    "dense",
    "embedding",
    "feature_projection",
)
PHASE_OF_MODULE = {
    "jit_prefill_step": "prefill",
    "jit_draft_step": "draft",
    "jit_verify_step": "verify",
    "jit_commit_step": "commit",
    "jit_seat_step": "seat",
}
UNKNOWN = "(no scope)"

OpNames = dict[tuple[str, int | None], dict[str, str]]
"""By module and program: the op_name of every instruction."""


def op_names_of(events: Iterable[Event], programs: Sequence[dict[str, Any]]) -> OpNames:
    """Per program in the trace the op_names of the recorded program that fits it best: two
    programs of one step, for different numbers of rows, bear the same name."""
    seen = defaultdict(set)
    for event in events:
        seen[event.module, event.program].add(event.op)
    chosen = {}
    for (module, program), ops in seen.items():
        same = [p["op_names"] for p in programs if p["module"] == module]
        chosen[module, program] = max(same, key=lambda names: len(ops & set(names)), default={})
    return chosen


def scope_of(op_name: str, module: str) -> tuple[str, str]:
    """Phase and part of `jit(spec_step)/verify/Qwen3/layer_0/layers_0/mlp/down/dot_general`."""
    path = op_name.split(";")[0].split("/")
    phase = path[1] if len(path) > 1 and path[1] in PHASES else None
    phase = phase or PHASE_OF_MODULE.get(module, UNKNOWN)
    for outer in ("context", "head"):
        if outer in path:
            return phase, outer
    for name in reversed(path):
        name = name.split(".")[0]
        if name in PARTS:
            return phase, name
    if "attention" in path:
        return phase, "attention"
    return phase, "final norm" if "norm" in path else "other"
