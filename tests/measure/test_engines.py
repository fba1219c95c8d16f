"""The prefill programs of a benchmark's engine."""

from jaxspec.engine.plan.plan import Shapes, shapes_for
from jaxspec.measure.engines import _needed_shapes


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
        batch, width = needed.prefill_for(left)
        assert batch >= min(len(left), 4) and width >= max(left)
