"""Records the outputs of the reference implementations, for the parity tests.

    python scripts/record_oracles.py [qwen3] [dflash] [wide]

writes tests/data/oracles/{qwen3,dflash,wide}/*.{json,npz}, or only those that are named. It needs
torch and transformers, which the package itself never imports, and for `wide` 8 GB of memory.
Weights, prompts and features are random numbers seeded by their names (tests/oracles/draws.py,
wide_case.py), so only configs and outputs are kept.
"""

# torch is no dependency of the project, and oracles is only found through the path set below.
# pyright: reportMissingImports=false

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from oracles import dflash_cases, qwen3_cases, wide_case  # noqa: E402
from oracles.dflash_reference import run_drafter  # noqa: E402
from oracles.qwen3_reference import run_target  # noqa: E402
from oracles.wide_reference import run_wide  # noqa: E402

DATA = ROOT / "tests" / "data" / "oracles"


def main() -> None:
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    wide = {"config": wide_case.TARGET, "drafter": wide_case.DRAFTER, "masks": wide_case.MASKS}
    for model, cases, run in (
        ("qwen3", qwen3_cases.CASES, run_target),
        ("dflash", dflash_cases.CASES, run_drafter),
        ("wide", {"4b_width": wide}, lambda case: run_wide()),
    ):
        if sys.argv[1:] and model not in sys.argv[1:]:
            continue
        folder = DATA / model
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.iterdir():
            stale.unlink()
        for name, case in cases.items():
            outputs = run(case)
            record = {**case, "recorded_with": versions}
            (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
            np.savez(folder / f"{name}.npz", **outputs)
            print(model, name, {key: value.shape for key, value in outputs.items()})


if __name__ == "__main__":
    main()
