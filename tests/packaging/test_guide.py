"""docs/guide.md: its Python runs from top to bottom; its memory table is what shapes add up
to, and its table of steps what the results files say."""

import dataclasses
import json
import logging
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.keys_values import KeysValues
from jaxspec.cache.states import States
from jaxspec.checkpoint.fp8_names import quantised_drafter
from jaxspec.models import presets, shapes
from jaxspec.models.copied_head import MOST_WIDENED, outputs_at_once
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import num_bytes, parameter_shapes
from jaxspec.models.qwen3 import Qwen3
from jaxspec.models.qwen35 import Qwen35

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "guide.md").read_text()
GOLDENS = ROOT / "tests" / "data" / "goldens" / "a"
# Models that would have to be downloaded; the pair of the tests stands in for them.
STAND_INS = {
    "Qwen/Qwen3-8B": str(GOLDENS / "target"),
    "z-lab/Qwen3-8B-DFlash-b16": str(GOLDENS / "draft"),
}

PRINTED = "Engine(Qwen3 10.7M + DFlash 3.9M, dflash with up to 7 drafts, max_batch=2, "


@pytest.fixture(scope="module")
def guide() -> dict:
    """What all blocks leave behind, run one after the other as a reader would."""
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S))
    for name, folder in STAND_INS.items():
        assert name in program
        program = program.replace(f'"{name}"', repr(folder))
    names: dict = {"__name__": "guide"}
    exec(compile(program, "the Python of the guide", "exec"), names)
    return names


@pytest.mark.slow
def test_requests_get_what_the_guide_says(guide):
    assert "make 5003 tokens, but the context holds 256;" in guide["refusal"]
    assert "the context holds 256" in guide["failed"][1]
    assert len(guide["best"]) >= 2 and guide["answer"].text and not guide["ids"]
    assert repr(guide["engine"]).startswith(PRINTED) and PRINTED in TEXT
    assert repr(guide["other"]) == "Engine(closed)"


@pytest.mark.slow
def test_whole_sequences_and_steps_give_the_same_logits(guide):
    config = guide["module"].config
    assert guide["logits"].shape == (1, guide["width"], config.vocab_size)
    np.testing.assert_allclose(guide["logits"], guide["step_logits"], atol=1e-3)
    assert guide["features"].shape[-1] == len(guide["module"].capture) * config.decoder.hidden_size
    assert jax.tree.structure(guide["gradients"]) == jax.tree.structure(guide["params"])


@pytest.fixture(scope="module", autouse=True)
def the_log_as_it_was():
    """The guide switches the log on, as it is read for the first of these tests."""
    log, root = logging.getLogger("jaxspec"), logging.getLogger()
    level, handlers = log.level, list(root.handlers)
    yield
    log.setLevel(level)
    root.handlers[:] = handlers


def gigabytes(model) -> float:
    shapes = parameter_shapes(model).values()
    return sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in shapes) / 1e9


def bytes_per_token(model) -> int:
    decoder = model.config.decoder
    return 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * 2


@pytest.mark.parametrize("name", [name for name in (*shapes.QWEN3, *shapes.FP8) if name != "tiny"])
def test_the_memory_table_is_computed(name):
    config = presets.qwen3(name)
    target = Qwen3(config, dtype=jnp.bfloat16)
    drafter = DFlash(presets.dflash_for(config), dtype=jnp.bfloat16)
    per_token = bytes_per_token(target) + bytes_per_token(drafter)
    pages = 8 * math.ceil((4096 + drafter.config.block_size) / 64)
    parts = gigabytes(target), gigabytes(drafter), pages * 64 * per_token / 1e9
    written = [f"{part:.1f}" for part in (*parts, sum(parts))]
    written.insert(2, f"{per_token / 1024:.0f}")
    size = name.removeprefix("qwen3-").upper()
    assert f"| {size} | {' | '.join(written)} |" in TEXT


def test_the_memory_of_a_copied_head_is_computed():
    sizes = {}
    for name in ("4B", "8B"):
        config = quantised_drafter(presets.dflash_for(presets.qwen3(f"qwen3-{name.lower()}")), name)
        copying = parameter_shapes(DFlash(dataclasses.replace(config, copies_head=True)))
        copy = [shape for path, shape in copying.items() if path.startswith("copied_head/")]
        sizes[name] = f"{num_bytes(copy) / 1e9:.2f} GB for {name}"
        outputs, inputs = copying["copied_head/weight"].shape
        transposed = 2 * outputs_at_once(outputs, inputs) * inputs
        assert transposed < 0.07e9 and "up to 0.07 GB more while it is made" in flowing(TEXT)
    assert f"takes {sizes['4B']} and {sizes['8B']}" in flowing(TEXT)
    assert f"the copy takes {sizes['8B']}" in flowing((ROOT / "CHANGELOG.md").read_text())
    assert f"at most {MOST_WIDENED} tokens for all requests together" in flowing(TEXT)


def flowing(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", [name for name in shapes.QWEN35 if name != "tiny-hybrid"])
def test_the_memory_table_of_hybrid_targets_is_computed(name):
    config = presets.qwen35(name)
    target = Qwen35(config, dtype=jnp.bfloat16)
    cache = jax.eval_shape(lambda: target.new_cache(num_slots=1, num_pages=1, page_size=1))
    in_pages = [layer for layer in cache.layers if isinstance(layer, KeysValues)]
    per_slot = num_bytes([layer for layer in cache.layers if isinstance(layer, States)])
    size = name.removeprefix("qwen3.5-").upper()
    per_token = f"{num_bytes(in_pages) / 1024:.0f}"
    row = f"| {size} | {gigabytes(target):.1f} | {per_token} | {per_slot / 1e6:.1f} |"
    assert row in TEXT, row


STEPS_OF_8B = {
    "all in 16 bits": "8b",
    "the target's weights in 8 bits": "qwen3-8b-fp8",
    "the drafter's weights too": "qwen3-8b-fp8-drafter",
    "activations too": "qwen3-8b-fp8-activations-drafter",
}
"""Rows of the table of steps in 8 bits, and the results files that they are of."""


def test_steps_in_8_bits_are_those_of_the_results_files():
    body = TEXT.partition("| requests | 1 | 8 | 32 |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    shown = dict(re.findall(r"^\| (.+?) (\|.+\|)$", body, re.M))
    for name, file in STEPS_OF_8B.items():
        rows = json.loads((ROOT / "docs" / "results" / f"steps-{file}-h100.json").read_text())
        times = {row["concurrency"]: row["dflash_engine_ms"] for row in rows["rows"]}
        assert shown.pop(name) == f"| {times[1]:.1f} | {times[8]:.1f} | {times[32]:.1f} |"
    assert not shown
