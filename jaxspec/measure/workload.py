"""The requests of a benchmark: where prompts come from, and how each is continued."""

from collections.abc import Sequence

from jaxspec.console.prompts import chat_of, encoded
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.opened import Opened
from jaxspec.errors import UsageError
from jaxspec.measure.datasets import Sample, random_ids
from jaxspec.measure.load import Work
from jaxspec.measure.options import Requests

RANDOM_PROMPTS, RANDOM_TOKENS = 8, 128


def work_of(requests: Requests, samples: list[Sample] | None, opened: Opened) -> list[Work]:
    """The requests of these samples as token ids; random ids if there are no samples."""
    if samples is None:
        samples = _random(requests, opened.models.target.vocab_size)
    samples = samples[: requests.num_prompts]
    prompts = enumerate(zip(samples, _token_ids(requests, samples, opened), strict=True))
    return [
        Work(tuple(ids[: requests.input_len]), _params(requests, sample, number))
        for number, (sample, ids) in prompts
    ]


def _random(requests: Requests, vocab_size: int) -> list[Sample]:
    count, length = requests.num_prompts or RANDOM_PROMPTS, requests.input_len or RANDOM_TOKENS
    return random_ids(count, length, vocab_size, requests.seed)


def _token_ids(requests: Requests, samples: Sequence[Sample], opened: Opened) -> list[list[int]]:
    if opened.tokenizer is None:
        return [_ids_of(requests.dataset, sample) for sample in samples]
    prompts = [s.prompt if isinstance(s.prompt, str) else list(s.prompt) for s in samples]
    template = None if requests.no_chat_template else opened.chat_template
    return encoded(prompts, chat_of(template), opened.tokenizer.encode)


def _ids_of(dataset: str, sample: Sample) -> list[int]:
    if isinstance(sample.prompt, str):
        raise UsageError(
            f"--dataset {dataset} holds text and --model-shape has no tokenizer; "
            "expected --dataset random or a file with token ids"
        )
    return list(sample.prompt)


def _params(requests: Requests, sample: Sample, number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=sample.output_tokens or requests.output_len,
        temperature=requests.temperature,
        seed=(requests.seed + number) % 2**32,
        ignore_eos=requests.ignore_eos,
    )
