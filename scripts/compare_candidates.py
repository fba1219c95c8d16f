"""How many candidates each drafted position has to choose among, for a drafter with a transition.

    python scripts/compare_candidates.py --target DIR --draft DIR --prompts FILE --json FILE

The candidates are the likeliest tokens. Fewer of them take less time, but the token that the
transition would have chosen may be missing. The same prompts are continued greedily with every
number of candidates; 0 stands for all tokens. The prompts are lists of token ids, in the form of
the golden trajectories.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from measuring import about, write_json

from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.models.dflash import DFlash
from jaxspec.proposers.dflash import DFlashProposer

NUMBERS = (1, 2, 4, 8, 16, 32, 0)


def main() -> None:
    options = parse()
    opened = open_models(options.target, options.draft, dtype=options.dtype)
    prompts = [case["prompt"] for case in json.loads(options.prompts.read_text())["trajectories"]]
    rows = []
    for number in NUMBERS:
        rows.append({"candidates": number, **counts(choosing_among(opened, number), prompts)})
        print(rows[-1])
    write_json(options.json, {**about(), "rows": rows})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def choosing_among(opened: Opened, number: int) -> Opened:
    """The same models, with `number` candidates at each drafted position."""
    drafter = opened.drafter
    if not isinstance(drafter, DFlash) or drafter.config.transition is None:
        raise UsageError("--draft is a drafter without a transition; expected one that has one")
    transition = dataclasses.replace(drafter.config.transition, candidates=number or None)
    config = dataclasses.replace(drafter.config, transition=transition)
    proposer = DFlashProposer(DFlash(config, drafter.dtype))
    return dataclasses.replace(opened, models=Models(opened.models.target, (proposer,)))


def counts(opened: Opened, prompts: list[list[int]]) -> dict[str, Any]:
    engine = Engine.from_models(
        opened.models, opened.params, opened.tokenizer, max_model_len=448, batch_sizes=(8,)
    )
    outputs = engine.generate(prompts, SamplingParams(max_tokens=96, ignore_eos=True))
    steps = sum(output.stats.num_spec_steps for output in outputs)
    accepted = sum(output.stats.num_accepted_draft_tokens for output in outputs)
    return {"steps": steps, "mean_acceptance_length": round(1 + accepted / steps, 3)}


if __name__ == "__main__":
    sys.exit(cli.run(main))
