"""Sends requests with the openai package, which checks all types, and prints the texts as JSON.

Run by `serve_clients.py` in an environment with openai: URL MODEL PROMPT...
"""

import json
import sys

import openai  # pyright: ignore[reportMissingImports]


def main(url: str, model: str, *prompts: str) -> None:
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )
    [card, *_] = client.models.list().data
    assert card.id == model
    settings = {"model": model, "temperature": 0}
    whole = [
        client.completions.create(prompt=prompt, max_tokens=12, stop="\n\n", **settings)
        for prompt in prompts
    ]
    chat = {"messages": [{"role": "user", "content": prompts[0]}], "max_tokens": 12, **settings}
    answer = client.chat.completions.create(**chat)
    chunks = client.chat.completions.create(**chat, stream=True)
    streamed = [chunk.choices[0].delta.content or "" for chunk in chunks]
    seen = {
        "texts": [one.choices[0].text for one in whole],
        "chat": answer.choices[0].message.content,
        "chat_streamed": "".join(streamed),
    }
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
