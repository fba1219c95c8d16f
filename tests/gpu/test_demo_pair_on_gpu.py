"""The pair in the package on a GPU: drafts change nothing, and are as good as on a CPU."""

import jax
import pytest

import jaxspec
from jaxspec import SamplingParams

PROMPT = "def quicksort("
ON_CPU = 3.44
"""Mean acceptance length of this prompt's 128 tokens on a CPU (docs/results/demo-judged.json)."""
PARAMS = SamplingParams(max_tokens=128)


def small_engine(dtype: str, **options) -> jaxspec.Engine:
    sizes = {"max_batch": 2, "max_model_len": 256, "num_pages": 16, "prefill_chunk": 64}
    return jaxspec.Engine.from_pretrained(*jaxspec.demo_pair(), dtype=dtype, **sizes, **options)


@pytest.mark.gpu
def test_drafts_do_not_change_the_text_on_kernels():
    given = [PROMPT, "import os\n\n\nclass "]
    engine = small_engine("bfloat16", exact=True)
    attention = [use.runs_on for use in engine.stats().kernels if use.op == "paged_attention"]
    assert set(attention) == {"mosaic"}
    drafted, plain = engine.generate(given, PARAMS), engine.plain().generate(given, PARAMS)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert all(one.stats.mean_acceptance_length > 2 for one in drafted)


@pytest.mark.gpu
def test_acceptance_is_that_of_a_cpu():
    with jax.default_matmul_precision("highest"):  # without, float32 has ten bits in products
        output = small_engine("float32").generate(PROMPT, PARAMS)
    assert abs(output.stats.mean_acceptance_length - ON_CPU) < 0.15
