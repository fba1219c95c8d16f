"""The requests of a benchmark: where prompts come from, and what is asked of each."""

from collections.abc import Sequence

from jaxspec.console.prompts import chat_of, encoded
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.load_models import Opened
from jaxspec.errors import UsageError
from jaxspec.measure.datasets import OWN, Sample, own_set, random_ids, read_file
from jaxspec.measure.load import Work
from jaxspec.measure.options import Requests

RANDOM = "random"
RANDOM_PROMPTS, RANDOM_TOKENS = 8, 128


def read_samples(asked: Requests) -> list[Sample] | None:
    """None for random ids, which need the size of the vocabulary."""
    if asked.dataset == RANDOM:
        return None
    if asked.dataset in OWN:
        return own_set(asked.dataset)
    return read_file(asked.dataset, asked.dataset_format)


def work_of(asked: Requests, samples: list[Sample] | None, opened: Opened) -> list[Work]:
    """Samples as a model reads them; what `read_samples` left open is made up here."""
    if samples is None:
        samples = _random(asked, opened.models.target.config.vocab_size)
    samples = samples[: asked.num_prompts]
    prompts = enumerate(zip(samples, _token_ids(asked, samples, opened), strict=True))
    return [
        Work(tuple(ids[: asked.input_len]), _params(asked, sample, number))
        for number, (sample, ids) in prompts
    ]


def _random(asked: Requests, vocab_size: int) -> list[Sample]:
    count, length = asked.num_prompts or RANDOM_PROMPTS, asked.input_len or RANDOM_TOKENS
    return random_ids(count, length, vocab_size, asked.seed)


def _token_ids(asked: Requests, samples: Sequence[Sample], opened: Opened) -> list[list[int]]:
    prompts = [s.prompt if isinstance(s.prompt, str) else list(s.prompt) for s in samples]
    if opened.tokenizer is None:
        _expect_no_text(asked.dataset, samples)
        return prompts
    template = None if asked.no_chat_template else opened.chat_template
    return encoded(prompts, chat_of(template), opened.tokenizer.encode)


def _expect_no_text(dataset: str, samples: Sequence[Sample]) -> None:
    if any(isinstance(sample.prompt, str) for sample in samples):
        raise UsageError(
            f"--dataset {dataset} holds text and --model-shape has no tokenizer; "
            "expected --dataset random or a file with token ids"
        )


def _params(asked: Requests, sample: Sample, number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=sample.output_tokens or asked.output_len,
        temperature=asked.temperature,
        seed=(asked.seed + number) % 2**32,
        ignore_eos=asked.ignore_eos,
    )
