"""Records the outputs of the reference implementations, for the parity tests.

    python scripts/record_oracles.py [qwen3] [qwen35] [dflash] [wide] [hybrid_pair]

writes tests/data/oracles/{qwen3,qwen35,dflash,wide}/*.{json,npz}, or only those that are named.
With `qwen35` it also writes the tensor names of a folder with a vision part (qwen35_layout.json).
It needs torch and transformers, which the package itself never imports, and 8 GB of memory for
`wide`. Weights, prompts and features are random numbers seeded by their names
(tests/oracles/draws.py, hybrid_draws.py, wide_case.py), so only configs and outputs are stored.
`hybrid_pair` runs the trained pair in tests/data/hybrid_pair and writes its trajectories.json.
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

from oracles import dflash_cases, qwen3_cases, qwen35_cases, wide_case  # noqa: E402
from oracles.dflash_reference import run_drafter  # noqa: E402
from oracles.hybrid_pair_reference import PAIR, record_pair  # noqa: E402
from oracles.qwen3_reference import run_target  # noqa: E402
from oracles.qwen35_layout import layout  # noqa: E402
from oracles.qwen35_reference import run_hybrid  # noqa: E402
from oracles.wide_reference import run_wide  # noqa: E402

DATA = ROOT / "tests" / "data" / "oracles"


def main() -> None:
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    wide = {"config": wide_case.TARGET, "drafter": wide_case.DRAFTER, "masks": wide_case.MASKS}
    for model, cases, run in (
        ("qwen3", qwen3_cases.CASES, run_target),
        ("qwen35", qwen35_cases.CASES, run_hybrid),
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
        if model == "qwen35":
            record = layout() | {"recorded_with": versions}
            (DATA / "qwen35_layout.json").write_text(json.dumps(record, indent=1) + "\n")
    if not sys.argv[1:] or "hybrid_pair" in sys.argv[1:]:
        record = record_pair() | {"recorded_with": versions}
        (PAIR / "trajectories.json").write_text(json.dumps(record) + "\n")
        print("hybrid_pair", record["mean_acceptance_length"])


if __name__ == "__main__":
    main()
