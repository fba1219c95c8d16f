"""What completions and chats have in common: how to sample, how many choices, how to send them."""

import dataclasses

from jaxspec.engine.requests.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxspec.errors import UsageError
from jaxspec.serving.fields import Fields
from jaxspec.serving.refusals import bad_request

LONGEST_SALT = 1024
SEEDS = 2**32
MOST_CHOICES = 128


@dataclasses.dataclass(frozen=True)
class Generation:
    """The fields that both kinds of requests have."""

    model: str | None
    """The name of the model; None for the only one."""
    max_tokens: int | None
    """Most tokens of a choice; None if the request sets no limit."""
    n: int
    """Choices per prompt."""
    params: SamplingParams
    """How to sample. `max_tokens` and the seeds of choices after the first are set later."""
    logprobs: int | None
    """How many of the likeliest tokens are listed beside each token's own log probability; None for
    no log probabilities."""
    include_stop_text: bool
    """Whether a stop string that ended a text stays at its end."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk that has the usage."""
    continuous_usage: bool
    """Whether every chunk has the usage so far."""
    cache_salt: str | None
    """Keeps the request's part of the prefix cache apart from that of other salts."""


def read_generation(fields: Fields, max_tokens: int | None, logprobs: int | None) -> Generation:
    """Reads the common fields. `max_tokens` and `logprobs` are given, because their names or rules
    differ between the two kinds of requests."""
    stream = fields.flag("stream", False)
    options = _stream_options(fields, stream)
    salt = fields.text("cache_salt")
    if salt is not None and not 1 <= len(salt) <= LONGEST_SALT:
        raise bad_request(
            f"cache_salt has {len(salt)} characters; expected 1 to {LONGEST_SALT}", "cache_salt"
        )
    return Generation(
        model=fields.text("model"),
        max_tokens=max_tokens,
        n=fields.integer("n", 1, 1, MOST_CHOICES) or 1,
        params=_params(fields, logprobs),
        logprobs=logprobs,
        include_stop_text=fields.flag("include_stop_str_in_output", False),
        stream=stream,
        include_usage=options.flag("include_usage", False),
        continuous_usage=options.flag("continuous_usage_stats", False),
        cache_salt=salt,
    )


def _stream_options(fields: Fields, stream: bool) -> Fields:
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise bad_request("stream_options is given without stream; set stream", "stream_options")
    return options or Fields({})


def _params(fields: Fields, logprobs: int | None) -> SamplingParams:
    """The defaults are those of OpenAI's protocol, not those of `SamplingParams`."""
    top_k = fields.integer("top_k", 0, least=-1) or 0
    seed = fields.integer("seed", None, least=-(2**63), most=2**64 - 1)
    try:
        return SamplingParams(
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=max(top_k, 0),
            min_p=fields.number("min_p", 0.0),
            seed=None if seed is None else seed % SEEDS,
            stop=fields.texts("stop"),
            stop_token_ids=fields.ids("stop_token_ids"),
            ignore_eos=fields.flag("ignore_eos", False),
            logprobs=logprobs,
            speculate=fields.flag("speculate", True),
        )
    except UsageError as error:
        name = str(error).partition(" ")[0]
        raise bad_request(str(error), name if name in fields.values else None) from None


def read_logprobs(fields: Fields, name: str) -> int | None:
    return fields.integer(name, None, 0, MAX_LOGPROBS)


def params_of_choice(
    generation: Generation, choice: int, max_tokens: int, prompt_logprobs: int | None
) -> SamplingParams:
    """The parameters of one choice of a prompt. The first choice has the seed of the request, so it
    is the same as the only choice with n = 1; each further choice has the next seed."""
    seed = generation.params.seed
    return dataclasses.replace(
        generation.params,
        max_tokens=max_tokens,
        seed=None if seed is None else (seed + choice) % SEEDS,
        prompt_logprobs=prompt_logprobs,
    )
