"""Finds the phase of a step and the part of a model that an instruction comes from."""

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
    "confidence_head",
    "convolution",
    "delta_inputs",
    "delta",
    "delta_fold",
    "delta_out",
)
PHASE_OF_MODULE = {
    "jit_prefill_step": "prefill",
    "jit_draft_step": "draft",
    "jit_verify_step": "verify",
    "jit_commit_step": "commit",
    "jit_admit_step": "admit",
    "jit_copy_step": "admit",
}
UNKNOWN = "(no scope)"

OpNames = dict[tuple[str, int | None], dict[str, str]]
"""The op_name of every instruction, by module and program."""


def match_programs(events: Iterable[Event], programs: Sequence[dict[str, Any]]) -> OpNames:
    """For each program in the trace, the op_names of the recorded program that shares most
    instructions with it. Names alone do not tell programs apart, because the programs of a step for
    different batch sizes have the same name."""
    instructions = defaultdict(set)
    for event in events:
        instructions[event.module, event.program].add(event.op)
    chosen = {}
    for (module, program), ops in instructions.items():
        same_name = [one["op_names"] for one in programs if one["module"] == module]
        best = max(same_name, key=lambda names: len(ops & set(names)), default={})
        chosen[module, program] = best
    return chosen


def scope_of(op_name: str, module: str) -> tuple[str, str]:
    """Phase and part of `jit(spec_step)/verify/Qwen3/layer_0/layers_0/mlp/down/dot_general`."""
    path = op_name.split(";")[0].split("/")
    return _phase(path, module), _part(path)


def _phase(path: Sequence[str], module: str) -> str:
    of_module = PHASE_OF_MODULE.get(module, UNKNOWN)
    # In programs for several devices, the path has `shard_map` or nothing before the phase.
    return next((name for name in path[:3] if name in PHASES), of_module)


def _part(path: Sequence[str]) -> str:
    for outer in ("exchange", "context", "walk", "head"):
        if outer in path:
            return outer
    from_innermost = (name.split(".")[0] for name in reversed(path))
    if part := next((name for name in from_innermost if name in PARTS), None):
        return part
    if "attention" in path:
        return "attention"
    return "final norm" if "norm" in path else "other"
