"""Drafters that are quantised to FP8 while they are read: the text is the target's all the same."""

import json
import logging
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from golden_pair import GOLDENS, HOUSE, budget, trajectories

from jaxspec.checkpoint.conversion import convert
from jaxspec.demo import demo_pair
from jaxspec.engine.engine import Engine
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.errors import LoadError, UsageError
from jaxspec.layers.fp8 import Fp8
from oracles.more_heads import with_more_heads

TARGET = GOLDENS / "a" / "target"
KINDS = {"a": ("dflash", 1.65), "dflash2": ("dflash2", 3.8), "dspark": ("dspark", 3.5)}
"""The golden drafters, their kinds, and the least mean acceptance length. It is 1 for a drafter
whose drafts are all wrong."""
CLOSE = 0.1
"""How far the mean acceptance length may be from that of the unquantised drafter."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, pathlib.Path]:
    """The golden drafters in sizes that blocks of FP8 weights can have."""
    root = tmp_path_factory.mktemp("drafters")
    return {which: with_more_heads(GOLDENS / which / "draft", root / which) for which in KINDS}


def opened(folder: pathlib.Path, draft_quantization: str | None = "fp8") -> Opened:
    return open_models(TARGET, folder, dtype="float32", draft_quantization=draft_quantization)


def engine_of(pair: Opened, **options) -> Engine:
    options = {"driver": "overlapped", **HOUSE, **options}
    return Engine.from_models(pair.models, pair.params, pair.tokenizer, **options)


def mean_length(outputs) -> float:
    """Mean acceptance length over the steps of all requests."""
    return float(np.mean([n for one in outputs for n in one.stats.acceptance_lengths]))


@pytest.mark.slow
@pytest.mark.parametrize("which", KINDS)
def test_the_text_is_the_target_s_and_the_drafts_are_nearly_as_good(which, folders):
    cases = trajectories(which)
    prompts = [case["prompt"] for case in cases]
    engine = engine_of(opened(folders[which]))
    kind, least = KINDS[which]
    assert engine.plan.method == kind
    assert engine.models.proposers[0].drafter.config.decoder.fp8 == Fp8(blocks=True)
    outputs = engine.generate(prompts, budget(96))
    usual = engine_of(opened(folders[which], None)).generate(prompts, budget(96))
    for output, other, case in zip(outputs, usual, cases, strict=True):
        assert list(output.token_ids) == list(other.token_ids) == case["greedy"][:96]
    assert [one.stats.acceptance_lengths for one in usual] == [
        tuple(case["acceptance_lengths"][: len(one.stats.acceptance_lengths)])
        for one, case in zip(usual, cases, strict=True)
    ]
    assert abs(mean_length(outputs) - mean_length(usual)) < CLOSE
    assert mean_length(outputs) > least
    lengths = lambda several: [one.stats.acceptance_lengths for one in several]
    assert lengths(outputs) != lengths(usual), "rounding changes some draft"


def test_a_short_request_then_a_long_one_in_one_process(folders):
    """And plain decoding by the same engine's parameters says the same."""
    by_length = sorted(trajectories("a"), key=lambda case: len(case["prompt"]))
    short, long = by_length[0], by_length[-1]
    pair = opened(folders["a"])
    engine, plain = engine_of(pair), engine_of(pair, method="none")
    for case, tokens in ((short, 4), (long, 96)):
        [drafted] = engine.generate([case["prompt"]], budget(tokens))
        [alone] = plain.generate([case["prompt"]], budget(tokens))
        assert list(drafted.token_ids) == list(alone.token_ids) == case["greedy"][:tokens]
        assert drafted.stats.num_spec_steps > 0 == alone.stats.num_spec_steps


def test_drawn_drafts_and_exact_engines(folders):
    """A sampled request gets the same tokens alone and among others."""
    engine, cases = engine_of(opened(folders["a"]), exact=True), trajectories("a")[:3]
    prompts, drawn = [case["prompt"] for case in cases], budget(12, temperature=1.0, seed=7)
    [alone] = engine.generate(prompts[:1], drawn)
    among = engine.generate(prompts, [drawn, budget(16), budget(9, temperature=0.5)])
    assert alone.token_ids == among[0].token_ids
    assert list(among[1].token_ids) == cases[1]["greedy"][:16]


@pytest.mark.slow
def test_activations_of_both_models_in_8_bits(tmp_path):
    """Plain decoding with them says the same, and drafts are nearly as good as unrounded ones."""
    of_pair = GOLDENS / "fp8-block"
    folder = with_more_heads(of_pair / "draft", tmp_path / "draft", inner=256)
    cases = json.loads((of_pair / "trajectories.json").read_text())["trajectories"][:8]
    prompts = [case["prompt"] for case in cases]
    lengths = []
    for quantization in ("fp8", None):
        pair = open_models(
            of_pair / "target", folder, dtype="float32", draft_quantization=quantization
        )
        engine = engine_of(pair, fp8_activations=True)
        drafter = engine.loop.device.models.proposers[0].drafter.config.decoder.fp8
        assert drafter == (quantization and Fp8(blocks=True, quantised_inputs=True))
        outputs, plain = (one.generate(prompts, budget(60)) for one in (engine, engine.plain()))
        for output, alone in zip(outputs, plain, strict=True):
            assert output.token_ids == alone.token_ids
        lengths.append(mean_length(outputs))
    assert abs(lengths[0] - lengths[1]) < CLOSE and lengths[0] > 1.5, lengths


def test_what_an_engine_says_of_its_models(folders):
    options = {"max_batch": 1, "max_model_len": 64, "dtype": "float32"}
    engine = Engine.from_pretrained(TARGET, folders["a"], draft_quantization="fp8", **options)
    assert "float32 with a drafter in FP8" in repr(engine)
    ops = {(use.model, use.op) for use in engine.kernels}
    assert ("drafter", "fp8_product") in ops and ("target", "fp8_product") not in ops
    usual = Engine.from_pretrained(TARGET, folders["a"], **options)
    assert "FP8" not in repr(usual)


class TestRefused:
    def test_other_values(self):
        """Before a folder is looked for, and in a process that does not check types."""
        call = "open_models('nowhere', 'nowhere', draft_quantization='int8')"
        code = f"from jaxspec import open_models; {call}"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        said = "UsageError: draft_quantization is 'int8'; expected None or 'fp8'"
        assert run.stderr.splitlines()[-1].endswith(said)

    def test_eagle3(self):
        drafter = GOLDENS / "eagle3" / "draft"
        with pytest.raises(UsageError) as refusal:
            opened(drafter)
        assert str(refusal.value) == (
            f"draft_quantization is 'fp8', but {drafter} is a drafter of the kind 'eagle3'; "
            "expected a DFlash, DFlash2 or DSpark drafter; leave draft_quantization out"
        )

    def test_sizes_that_are_not_multiples_of_a_block(self):
        target, drafter = demo_pair()
        for one, sizes in ((GOLDENS / "a" / "draft", "head_dim is 64"), (drafter, "size is 320")):
            wanted = f"{sizes}, expected a multiple of 128 .*; leave draft_quantization out$"
            with pytest.raises(LoadError, match=wanted):
                open_models(TARGET if one != drafter else target, one, draft_quantization="fp8")

    def test_what_jaxspec_convert_wrote(self, folders, tmp_path):
        convert(folders["a"], tmp_path)
        with pytest.raises(UsageError, match="written by jaxspec convert, and draft_quantization"):
            opened(tmp_path)
        assert opened(tmp_path, None).drafter.config.decoder.fp8 is None

    def test_before_weights_are_read(self, monkeypatch):
        monkeypatch.setattr("jaxspec.engine.setup.load_models._loaded", None)
        with pytest.raises(UsageError, match="of the kind 'eagle3'"):
            opened(GOLDENS / "eagle3" / "draft")


def test_without_a_drafter_the_log_says_that_it_does_nothing(caplog):
    with caplog.at_level(logging.WARNING, "jaxspec"):
        open_models(TARGET, dtype="float32", draft_quantization="fp8")
    assert "draft_quantization has no effect: there is no drafter" in caplog.messages
    caplog.clear()
    open_models(TARGET, dtype="float32")
    assert not caplog.messages
