"""Fields of requests that stand for something that does not exist here.

Clients send many of them with a value that changes nothing, so such a value is accepted. Any other
value is refused with the name of the field, because the answer would not be what was asked for.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import shown
from jaxspec.serving.refusals import bad_request

TEXT_FORMAT = {"type": "text"}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"], []),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": (TEXT_FORMAT,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""The values of each field that change nothing; null is always accepted, too."""

NEUTRAL_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "tool_choice": ("none", "auto"),
}
"""The same for fields of chats only."""


def refuse_what_is_not_built(
    body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    for name in sorted(neutral.keys() & body.keys()):
        value = body[name]
        if value is not None and not any(_same(value, one) for one in neutral[name]):
            accepted = " or ".join([*map(json.dumps, neutral[name]), "null"])
            raise bad_request(
                f"{name} is {shown(value)}, but this server does not have it; expected {accepted}, "
                "or leave it out",
                name,
            )


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
