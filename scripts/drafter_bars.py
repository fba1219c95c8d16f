"""Compares the step times of every kind of drafter with the longest that they may be.

    python scripts/measure_all.py --only drafters --out FOLDER --device h200
    python scripts/drafter_bars.py FOLDER --device h200

A step of DSpark or DFlash2 may take 4 % longer than a step of DFlash that verifies as many tokens,
and in addition the time for reading its drafter's extra bytes at the speed of a large copy. A step
of EAGLE-3 with three drafts may take 6.6 ms for one request on an H100. `measure_all.py` prints the
same comparison when it has measured this group.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

COPIES = {"H100": 2.95e12, "H200": 4.3e12}
"""Bytes per second of a large copy, by a part of the device's name."""
LONGER = 1.04
EAGLE3_MS = 6.6
PAIRS = {"dflash2": 16, "dspark": 8}
"""Kinds that are compared with DFlash, and the tokens that their steps verify for each request."""


class Bar(NamedTuple):
    kind: str
    slots: int
    step_ms: float
    dflash_ms: float | None
    extra_bytes: int
    """Bytes that the drafter reads in a step beyond those that the DFlash drafter reads."""
    most_ms: float
    """The longest that the step may take."""

    def __str__(self) -> str:
        beside = "" if self.dflash_ms is None else f", DFlash {self.dflash_ms:.2f} ms"
        beside += f", {self.extra_bytes / 1e6:.1f} MB more" if self.dflash_ms is not None else ""
        kept = "kept" if self.step_ms <= self.most_ms else "MISSED"
        return (
            f"{self.kind:8} {self.slots:3} slots: {self.step_ms:.2f} ms{beside}; "
            f"at most {self.most_ms:.2f} ms: {kept}"
        )


def bars(folder: Path, device: str) -> list[Bar]:
    """The bars of all kinds whose files are there."""
    found = []
    for kind, width in PAIRS.items():
        own, plain = (_report(folder, one, width, device) for one in (kind, "dflash"))
        if own is not None and plain is not None:
            found += _against_dflash(own, plain)
    eagle3 = _report(folder, "eagle3", 4, device)
    if eagle3 is not None:
        one = (row for row in eagle3["rows"] if row["concurrency"] == 1)
        found += [Bar("eagle3", 1, row["eagle3_engine_ms"], None, 0, EAGLE3_MS) for row in one]
    return found


def _report(folder: Path, kind: str, width: int, device: str) -> dict[str, Any] | None:
    file = folder / f"steps-8b-{kind}-b{width}-{device}.json"
    return json.loads(file.read_text()) if file.exists() else None


def _against_dflash(own: dict[str, Any], plain: dict[str, Any]) -> list[Bar]:
    kind, extra = own["kind"], own["draft_bytes"] - plain["draft_bytes"]
    device = own["environment"]["device"]
    copied = next((speed for name, speed in COPIES.items() if name in device), COPIES["H100"])
    of_dflash = {row["concurrency"]: row["dflash_engine_ms"] for row in plain["rows"]}
    return [
        Bar(
            kind,
            slots := row["concurrency"],
            row[f"{kind}_engine_ms"],
            of_dflash[slots],
            extra,
            LONGER * of_dflash[slots] + 1e3 * extra / copied,
        )
        for row in own["rows"]
        if row["concurrency"] in of_dflash
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="h100", help="its name, in the names of the files")
    options = parser.parse_args()
    found = bars(options.folder, options.device)
    print("\n".join(map(str, found)) or f"{options.folder} has no two files to compare")
    sys.exit(0 if found and all(one.step_ms <= one.most_ms for one in found) else 1)


if __name__ == "__main__":
    main()
