"""Sends requests to a server at given times and notes when each piece of their answers arrives.

It is a process of its own for `bench_serving.py`, so that the client's work takes no time from the
server's interpreter. It reads a plan from standard input and writes what it noted to standard
output, both as JSON. It imports nothing but the standard library.
"""

import asyncio
import json
import sys
import time
from typing import Any


async def main() -> None:
    plan = json.load(sys.stdin)
    begin = time.perf_counter() + 0.2
    begun = [asyncio.Event() for _ in plan["requests"]]
    requests = [
        one_request(plan["host"], plan["port"], one, begin, begun, place)
        for place, one in enumerate(plan["requests"])
    ]
    json.dump(await asyncio.gather(*requests), sys.stdout)


async def one_request(
    host: str,
    port: int,
    asked: dict[str, Any],
    begin: float,
    begun: list[asyncio.Event],
    place: int,
) -> dict[str, Any]:
    """Sends a request, and returns when its pieces came, in seconds since it was sent. It is sent
    `at` seconds after the beginning, or after the first `behind` requests have begun to get
    answers. The returned `sent` is in seconds since the beginning."""
    if asked["behind"]:
        await asyncio.gather(*(one.wait() for one in begun[: asked["behind"]]))
        begin_of_this = time.perf_counter()
    else:
        begin_of_this = begin
    await asyncio.sleep(max(begin_of_this + asked["at"] - time.perf_counter(), 0.0))
    body = json.dumps(asked["body"]).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port, limit=2**22)
    sent = time.perf_counter()
    writer.write(head.encode() + body)
    status = (await reader.readline()).decode().split(" ")[1]
    times: list[float] = []
    usage: dict[str, Any] = {}
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter() - sent
        if b'"choices": []' in line:
            usage = json.loads(line[6:])["usage"]
        else:
            times.append(now)
            begun[place].set()
    writer.close()
    begun[place].set()  # also if it was refused
    return {"sent": sent - begin, "status": int(status), "times": times, "usage": usage}


if __name__ == "__main__":
    asyncio.run(main())
