"""Deploys two replicas with `examples/ray_serve.py`, and prints their answers as JSON.

Run by `serve_clients.py` in an environment with ray[serve] and jaxspec: PAIR TOKENS PROMPT...
Every prompt is sent several times, all at once. How many requests each replica has answered is read
from its metrics, whenever a request for metrics happens to reach it.
"""

import concurrent.futures
import json
import re
import runpy
import socket
import sys
import time
import urllib.request
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
ROUNDS = 4
"""How many times every prompt is sent."""
LOOKS = 60
"""The most requests for metrics until both replicas have answered one."""


def main(pair: str, tokens: str, *prompts: str) -> None:
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    example, port = runpy.run_path(str(EXAMPLE)), free_port()
    sys.argv = ["ray_serve.py", "--model", f"{pair}/target", "--draft-model", f"{pair}/draft"]
    sys.argv += ["--replicas", "2", "--max-batch", "2", "--port", str(port)]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port})
    serve.run(example["deployment"](example["parse"]()))
    url = f"http://127.0.0.1:{port}"
    asked = [*prompts] * ROUNDS
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        texts = [*pool.map(lambda prompt: text_of(url, prompt, int(tokens)), asked)]
    in_rounds = [texts[at : at + len(prompts)] for at in range(0, len(texts), len(prompts))]
    seen = {"texts": in_rounds, "answered": answered_by_each(url, len(asked))}
    serve.shutdown()
    ray.shutdown()
    print("\n" + json.dumps(seen))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def text_of(url: str, prompt: str, tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]["text"]


def answered_by_each(url: str, total: int) -> list[int]:
    """How many requests each replica has answered, out of `total` in all."""
    seen: list[int] = []
    for _ in range(LOOKS):
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            counts = re.findall(r"request_success_total\{[^}]*\} (\S+)", answer.read().decode())
        one = int(sum(map(float, counts)))
        if one not in seen:
            seen.append(one)
        if sum(seen) == total:
            return seen
        if 2 * one == total:
            return [one, one]
        time.sleep(0.2)
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
