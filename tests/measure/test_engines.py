"""The prefill programs of a benchmark's engine, and its random pairs."""

import pytest

from jaxspec.bench import _kinds
from jaxspec.engine.plan.plan import Shapes, shapes_for
from jaxspec.engine.schedule.prefill import chunks_of
from jaxspec.measure.engines import _needed_shapes
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_shapes
from jaxspec.models.presets import drafter_for, qwen3


def test_prefill_is_no_narrower_than_the_prompts_need():
    shapes = shapes_for(8, 512, exact=False).prefill_shapes
    assert {w for _, w in shapes} == {64, 512}
    assert {w for _, w in _needed_shapes(shapes, [512, 100])} == {512}
    assert {w for _, w in _needed_shapes(shapes, [520])} == {64, 512}
    assert _needed_shapes(((1, 16),), [3]) == ((1, 16),)


def test_every_prompt_still_finds_a_shape():
    shapes = shapes_for(8, 512, exact=False).prefill_shapes
    needed = Shapes((8,), _needed_shapes(shapes, [300, 512, 513]))
    for left in ([300], [512, 300], [1], [1, 512, 512, 300, 1]):
        chunks = list(chunks_of(needed, left, budget=2048))
        assert {(chunk.batch, chunk.width) for chunk in chunks} <= {*needed.prefill_shapes}
        assert all(chunk.width >= left[row] for chunk in chunks for row in chunk.rows)
        assert sorted(row for chunk in chunks for row in chunk.rows) == [*range(len(left))]


@pytest.mark.parametrize(
    ("methods", "kind"),
    [("none,dflash", "dflash"), ("none,dspark+ngram", "dspark"), ("eagle3,none", "eagle3")],
)
def test_a_random_drafter_is_of_the_kind_that_a_method_names(methods, kind):
    assert _kinds(methods.split(",")) == [kind]
    assert _kinds(["ngram", "none"]) == []


def test_drafters_of_the_published_proportions():
    target = qwen3("qwen3-8b")
    dflash, dspark = (drafter_for(kind, target) for kind in ("dflash", "dspark"))
    assert (dflash.kind, dflash.rows, dflash.num_drafts) == ("dflash", 16, 15)
    assert (dspark.kind, dspark.rows, dspark.num_drafts) == ("dspark", 7, 7)
    assert drafter_for("dspark", target, 5).rows == 4
    shapes = parameter_shapes(DFlash(dspark))
    assert shapes["transition/following/embedding"].shape == (target.vocab_size, 256)
    assert shapes["confidence_head/kernel"].shape == (4096 + 256, 1)
