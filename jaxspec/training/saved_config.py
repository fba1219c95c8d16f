"""The config of a run, kept in its folder: a run can only be resumed with the same config."""

import json
from pathlib import Path
from typing import Any

from jaxspec.errors import UsageError
from jaxspec.files import read_json_object

RESUMABLE = ("states/*[0-9]", "on_policy.npz", "features/labels.npy")
"""Patterns of the files that a resumed run continues from."""


def save_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes the config of a new run into its folder; the config of a resumed run must be equal.

    If a run ended before it wrote any such file, for example because of wrong flags, it is new.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train_config.json"
    if not path.exists() or not any(any(folder.glob(pattern)) for pattern in RESUMABLE):
        path.write_text(json.dumps(config, indent=2) + "\n")
        return
    changes = differences(read_json_object(path, remedy="give another --out"), config)
    if changes:
        raise UsageError(
            f"{folder} holds a run with another config ({'; '.join(changes)}); "
            "give the same flags to resume it, or another --out"
        )


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Lines like `batch_size: 8 -> 16`, for every entry in which two configs differ."""
    return [
        f"{name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in sorted({*old, *new})
        if old.get(name, "absent") != new.get(name, "absent")
    ]
