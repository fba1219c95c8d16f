"""The options of a benchmark, with the names of its flags."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Requests:
    """The requests to send, as options that need no model."""

    dataset: str
    """prose, python, repetitive, random (token ids), or a file; by default prose, python for the
    demo pair and random for --model-shape."""
    dataset_format: Literal["auto", "jsonl", "spec-bench", "sharegpt"] = "auto"
    """Layout of the file; auto recognizes it."""
    num_prompts: int | None = None
    """Send only the first of the dataset's requests; by default all, and 8 random ones."""
    input_len: int | None = None
    """Cut prompts to this many tokens; random prompts have exactly this many, 128 by default."""
    output_len: int = 64
    """Most tokens to generate, unless the dataset sets a length."""
    no_chat_template: bool = False
    """Use prompts as they are, without a chat template."""
    ignore_eos: bool = False
    """Continue after the model's end-of-text tokens, so that every output has its full length."""
    temperature: float = 0.0
    """Temperature of sampling; 0 is greedy decoding."""
    seed: int = 0
    """Seed of random prompts and of the first request; every later request has the next one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
    """How often the requests are sent, and how fast."""

    passes: int = 3
    """Times that the requests are sent, for each method and concurrency."""
    requests_per_slot: int | None = None
    """Number of requests in a pass for each one at once; by default every request is sent once."""
    request_rate: float | None = None
    """Requests that arrive per second, at random intervals; by default a request is sent as soon
    as another ends."""
    seed: int = 0
    """Seed of the intervals."""
