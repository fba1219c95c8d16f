"""`jaxspec train --kind`: what the command writes for each kind, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.models.dflash import DFlash
from jaxspec.train import main
from jaxspec.training.new_drafter import drafter_config, first_drafter_params
from jaxspec.training.recipe import DrafterShape, Optimization, Recipe, TrainingInputs
from jaxspec.training.train_drafter import Cadence, TrainingRun, config_of

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "tests" / "data" / "goldens" / "a" / "target"
TINY = (
    "--length 32 --block-size 4 --layers 1 --features 1 --anchors 4 --batch-size 2 --steps 2 "
    "--rank 4 --log-every 1 --compute float32"
)


def command(out: Path, *flags: str) -> list[str]:
    text = ["--data", str(Path(__file__)), "--out", str(out)]
    return ["--target", str(TARGET), *text, *TINY.split(), *flags]


def test_heads_alone_learn_on_a_drafter_and_text_is_shared(tmp_path, capsys):
    """The heads are learned, all else is that of the drafter they start from."""
    shared = ["--on-policy", "--shortest-prompt", "4", "--shared", str(tmp_path / "shared")]
    assert main(command(tmp_path / "plain", "--steps", "1", *shared)) == 0
    assert not (tmp_path / "plain" / "on_policy.npz").exists()
    text = (tmp_path / "shared" / "on_policy.npz").read_bytes()
    heads = ["--kind", "dspark", "--start-from", str(tmp_path / "plain" / "zlab")]
    heads += ["--learn", "heads", "--seed", "7", *shared]
    assert main(command(tmp_path / "heads", *heads)) == 0
    assert (tmp_path / "shared" / "on_policy.npz").read_bytes() == text

    start = open_drafter(tmp_path / "plain" / "zlab")
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == str(tmp_path / "heads" / "speculators"), "no other layout has such a drafter"
    learned = open_drafter(told)
    config = learned.config
    assert config.kind == "dspark" and config.confidence is not None
    assert (config.anchor_first, config.block_size, config.transition.rank) == (False, 4, 4)
    before, after = start.load(np.float32), learned.load(np.float32)
    same = {name: after[name] for name in before}
    jax.tree.map(np.testing.assert_array_equal, same, before)
    assert set(after) - set(before) == {"transition", "confidence_head", "embedding", "head"}
    saved = json.loads((tmp_path / "heads" / "train_config.json").read_text())
    assert saved["learn"] == "heads" and "drafter_sha256" in saved and "start_from" not in saved
    lines = (tmp_path / "heads" / "log.jsonl").read_text().splitlines()
    assert {"cross_entropy", "distance", "confidence"} <= json.loads(lines[-1]).keys()


def test_dspark_learns_from_kept_features_if_it_learns_from_labels_alone(tmp_path):
    flags = ["--kind", "dspark", "--dspark-weights", "1", "0", "0"]
    lines = []
    for name, kept in ("computed", []), ("kept", ["--keep-features"]):
        assert main(command(tmp_path / name, *flags, *kept)) == 0
        last = json.loads((tmp_path / name / "log.jsonl").read_text().splitlines()[-1])
        lines.append({of: last[of] for of in ("loss", "acceptance_length")})
        assert not {"cross_entropy", "distance", "confidence"} & last.keys()
    assert lines[0] == pytest.approx(lines[1], rel=1e-5)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--kind dflash2 --draft-vocab-size 60", "for a DFlash2 drafter, which drafts all tokens"),
        ("--kind eagle3 --block-size 80", "block_size is 80, expected at most 65 for an EAGLE-3"),
        ("--kind dspark --dspark-weights 1 0", "expected three numbers of 0 or more"),
        ("--kind dspark --rank 0", "rank is 0, expected at least 1"),
        ("--learn heads", "a dflash drafter has no heads to learn alone"),
        ("--kind eagle3 --learn heads", "a eagle3 drafter has no heads to learn alone"),
        ("--kind dspark --keep-features", "DSpark needs the target's logits"),
        (f"--kind dspark --start-from {ROOT}/tests/data/goldens/dspark/draft", "start from a"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, flags, message):
    assert main(command(tmp_path / "out", *flags.split())) in (1, 2)
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and message in line


def test_the_config_of_a_dflash_run_does_not_know_of_other_kinds():
    """So that a run can be resumed that began before there were any."""
    inputs = TrainingInputs(TARGET, (Path(__file__),))
    run = TrainingRun(inputs, DrafterShape(), Recipe(), Optimization(), Cadence())
    of_dflash = config_of(run)
    assert of_dflash["layers"] == 5
    added = {"kind", "rank", "markov", "dspark_weights", "selector_weight", "learn", "start_from"}
    assert not (added | {"shared"}) & of_dflash.keys()
    of_dspark = config_of(replace(run, shape=DrafterShape("dspark")))
    assert of_dspark.keys() - of_dflash.keys() == {"kind", "rank", "markov", "dspark_weights"}
    assert config_of(replace(run, shape=DrafterShape("eagle3")))["layers"] == 1


def test_convolutions_of_a_new_drafter_leave_everything_as_it_is():
    """So that a DFlash drafter that was given them drafts as before, until they have learned."""
    target = open_target(TARGET)
    shape = DrafterShape("dflash2", 4, 1, features=1, rank=4)
    drafter = DFlash(drafter_config(target.config, shape, 0))
    params = first_drafter_params(drafter, target.config, {}, None, jax.random.key(0))
    for sublayer in "attention", "mlp":
        convolution = params["layers_0"][f"{sublayer}_convolution"]
        assert not np.any(convolution["projection"]["kernel"])
        assert np.all(convolution["base"][:, 0] == 1) and not np.any(convolution["base"][:, 1:])
    assert np.any(params["layers_0"]["mlp"]["down"]["kernel"])
