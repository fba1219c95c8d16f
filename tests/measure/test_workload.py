"""The requests of a benchmark, without models to send them to."""

import pathlib

import jax.numpy as jnp
import pytest

from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.measure.datasets import Sample, read_samples
from jaxspec.measure.options import Requests
from jaxspec.measure.workload import work_of
from jaxspec.models.presets import qwen3
from jaxspec.models.qwen3 import Qwen3
from jaxspec.text.tokenizer import open_tokenizer

TARGET = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "a" / "target"
MODELS = Models(Qwen3(qwen3("tiny"), (), jnp.float32))
WITHOUT_TOKENIZER = Opened(MODELS, {}, None, None)
TOKENIZER = open_tokenizer(TARGET)
WITH_TOKENIZER = Opened(MODELS, {}, TOKENIZER, None)


def test_random_prompts_are_of_the_model_s_vocabulary():
    requests = Requests("random", num_prompts=3, input_len=40, output_len=5, seed=2**32 - 1)
    assert read_samples(requests) is None
    work = work_of(requests, None, WITHOUT_TOKENIZER)
    assert [len(one.prompt) for one in work] == [40, 40, 40]
    assert max(max(one.prompt) for one in work) < MODELS.target.config.vocab_size
    assert [one.params.seed for one in work] == [2**32 - 1, 0, 1]
    assert {one.params.max_tokens for one in work} == {5}


def test_random_prompts_of_default_size():
    work = work_of(Requests("random"), None, WITHOUT_TOKENIZER)
    assert [len(one.prompt) for one in work] == [128] * 8


def test_prompts_are_cut_and_a_sample_may_set_the_length_of_its_reply():
    samples = [Sample((1, 2, 3), output_tokens=7), Sample((4,)), Sample((5,))]
    requests = Requests("a file", num_prompts=2, input_len=2, output_len=9, ignore_eos=True)
    first, second = work_of(requests, samples, WITHOUT_TOKENIZER)
    assert (first.prompt, second.prompt) == ((1, 2), (4,))
    assert (first.params.max_tokens, second.params.max_tokens) == (7, 9)
    assert first.params.ignore_eos


def test_text_and_ids_may_be_in_one_dataset():
    text, ids = work_of(Requests("a file"), [Sample("def area("), Sample((3, 4))], WITH_TOKENIZER)
    assert TOKENIZER.decode(list(text.prompt)) == "def area("
    assert ids.prompt == (3, 4)


def test_text_needs_a_tokenizer():
    samples = read_samples(Requests("prose"))
    with pytest.raises(UsageError, match="--dataset prose holds text and --model-shape has no"):
        work_of(Requests("prose"), samples, WITHOUT_TOKENIZER)
