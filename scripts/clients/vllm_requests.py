"""Requests streams with vLLM's own benchmark client, and prints what it found in them as JSON.

Run by `serve_clients.py` in an environment with aiohttp, regex and tqdm. The client is one file of
vLLM, which is loaded by itself: FILE URL MODEL REQUESTS TOKENS.
"""

import asyncio
import importlib.util
import json
import sys
from typing import Any

PATHS = {
    "async_request_openai_completions": "/v1/completions",
    "async_request_openai_chat_completions": "/v1/chat/completions",
}


def loaded(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("endpoint_request_func", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def main(file: str, url: str, model: str, requests: int, tokens: int) -> None:
    client, seen = loaded(file), []
    async with client.aiohttp.ClientSession() as session:
        for name, path in PATHS.items():
            asked = [
                client.RequestFuncInput(
                    prompt=f"def f{number}(",
                    api_url=url + path,
                    prompt_len=5,
                    output_len=tokens,
                    model=model,
                    ignore_eos=True,
                )
                for number in range(requests)
            ]
            send = getattr(client, name)
            for one in await asyncio.gather(*(send(each, session) for each in asked)):
                seen.append(
                    {
                        "path": path,
                        "success": one.success,
                        "output_tokens": one.output_tokens,
                        "ttft": one.ttft,
                        "gaps": len(one.itl),
                        "text": one.generated_text,
                        "error": one.error,
                    }
                )
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    file, url, model, requests, tokens = sys.argv[1:]
    asyncio.run(main(file, url, model, int(requests), int(tokens)))
