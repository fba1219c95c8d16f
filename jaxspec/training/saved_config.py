"""The config of a run, kept in its folder: a run can only be resumed with the same config."""

import json
from pathlib import Path
from typing import Any

from jaxspec.errors import UsageError
from jaxspec.files import read_json_object
from jaxspec.training.fingerprints import hash_of_json
from jaxspec.training.whole_files import write_text_whole

RESUMABLE = ("states/*[0-9]", "on_policy.npz", "features/labels.npz")
"""Patterns of the files that a resumed run continues from."""
PLACES = ("data", "target")
"""Entries that say where the inputs were. Inputs may move: only their hashes are compared."""
CONTENTS = {
    "data_sha256": "the text to train on",
    "tokenizer_sha256": "the tokenizer of the target",
    "target_sha256": "the config or the weights of the target",
    "drafter_sha256": "the config or the weights of the drafter to start from",
}
"""Entries that are hashes of the inputs, and what an error message calls the inputs."""


def save_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes the config of a new run into its folder; the config of a resumed run must be equal.

    If a run ended before it wrote any such file, for example because of wrong flags, it is new.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train_config.json"
    kept = next((file for pattern in RESUMABLE for file in folder.glob(pattern)), None)
    if kept is None:
        write_text_whole(path, json.dumps(config, indent=2) + "\n")
        return
    if not path.exists():
        raise UsageError(
            f"{folder} has {kept.relative_to(folder)} of a run but no {path.name}, expected both: "
            "what the run learned from is not known; give another --out"
        )
    changes = differences(read_json_object(path, remedy="give another --out"), config)
    if changes:
        raise UsageError(
            f"{folder} holds a run with another config ({'; '.join(changes)}); "
            "give the same flags and files to resume it, or another --out"
        )


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Lines like `batch_size: 8 -> 16`, for every entry in which two configs differ."""
    return [
        _difference(name, old.get(name, "absent"), new.get(name, "absent"))
        for name in sorted({*old, *new} - {*PLACES})
        if old.get(name, "absent") != new.get(name, "absent")
    ]


def _difference(name: str, old: Any, new: Any) -> str:
    if name not in CONTENTS:
        return f"{name}: {old} -> {new}"
    if old == "absent":
        return f"{CONTENTS[name]}: the run does not say what it was"
    return f"{CONTENTS[name]} has changed"


def hash_of_config(config: dict[str, Any]) -> str:
    """A hash that is the same for two configs if and only if `differences` finds none."""
    return hash_of_json({name: value for name, value in config.items() if name not in PLACES})
