"""Many clients at once: each gets its own answer, and nothing is left when they are gone."""

import asyncio
import json

import httpx
from running_server import QUEUED, SECONDS, greedy, until

PROMPTS = [f"def f{number}(x, y):\n    " for number in range(32)]
TOKENS = 12


def completion(prompt: str, **fields) -> dict:
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0} | fields


def connected(server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=SECONDS, limits=limits)


async def streamed_text(client: httpx.AsyncClient, prompt: str) -> str:
    text = ""
    body = completion(prompt, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
    return text


def nothing_is_left(server) -> bool:
    stats = server.engine.stats()
    busy = server.service.unfinished or stats.waiting or stats.running
    return not busy and server.engine.free_pages == server.engine.total_pages


def test_each_of_32_streams_is_its_solo_answer(server):
    async def all_at_once() -> list[str]:
        async with connected(server) as client:
            return await asyncio.gather(*(streamed_text(client, one) for one in PROMPTS))

    texts = asyncio.run(all_at_once())
    alone = [server.engine.generate(prompt, greedy(TOKENS)).text for prompt in PROMPTS]
    assert texts == alone
    until(lambda: nothing_is_left(server), "pages or requests are left")


def test_beyond_the_queue_every_answer_is_well_formed(server):
    count, rejected = 3 * (32 + QUEUED), server.service.counts.rejections

    async def storm() -> list[httpx.Response]:
        async with connected(server) as client:
            bodies = [completion(PROMPTS[at % 32], stream=bool(at % 2)) for at in range(count)]
            posts = [client.post("/v1/completions", json=body) for body in bodies]
            return await asyncio.gather(*posts)

    answers = asyncio.run(storm())
    refused = [answer for answer in answers if answer.status_code == 503]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == count
    assert len(served) >= 32 + QUEUED and len(refused) > 0
    for answer in refused:
        error = answer.json()["error"]
        assert answer.headers["retry-after"] == "1" and error["code"] == 503
        assert "try again later" in error["message"]
    for answer in served:
        if answer.headers["content-type"] == "application/json":
            assert answer.json()["choices"][0]["finish_reason"] in ("length", "stop")
        else:
            assert answer.text.endswith("data: [DONE]\n\n") and '"finish_reason": "' in answer.text
    assert server.service.counts.rejections == rejected + len(refused)
    until(lambda: nothing_is_left(server), "pages or requests are left")


def test_more_choices_than_can_ever_wait_are_a_mistake_of_the_client(server):
    answer = server.post("/v1/completions", completion("a", n=32 + QUEUED + 1))
    assert answer.status_code == 400 and "choices" in answer.json()["error"]["message"]


def test_fifty_clients_that_leave_take_nothing_with_them(server):
    ended = server.service.counts.ended["abort"]

    async def leave(client: httpx.AsyncClient, at: int) -> None:
        body = completion(PROMPTS[at % 32], max_tokens=150, stream=True, ignore_eos=True)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    return  # which closes the connection in mid-stream

    async def leave_without_stream(client: httpx.AsyncClient) -> None:
        body = completion(PROMPTS[0], max_tokens=150, ignore_eos=True)
        work = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while not server.engine.num_running and not work.done():
            await asyncio.sleep(0.01)
        work.cancel()

    async def all_at_once() -> None:
        async with connected(server) as client:
            waiting = leave_without_stream(client)
            await asyncio.gather(waiting, *(leave(client, at) for at in range(50)))

    asyncio.run(all_at_once())
    until(lambda: nothing_is_left(server), "pages or requests are left")
    assert server.service.counts.ended["abort"] - ended == 51


def test_pages_are_back_within_two_steps(server):
    """The steps are counted that the engine's thread runs after the connection was closed."""
    seen: list[int] = []
    abort = server.service.thread.abort

    def noticed(job) -> None:
        seen.append(server.service.thread.steps)
        abort(job)

    server.service.thread.abort = noticed
    try:
        with server.client() as client:
            body = completion(PROMPTS[0], max_tokens=150, stream=True, ignore_eos=True)
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        until(lambda: nothing_is_left(server), "pages or requests are left")
    finally:
        server.service.thread.abort = abort
    [steps] = seen
    assert server.service.thread.steps - steps <= 2


def test_a_slow_reader_gets_everything(server):
    """What several steps have made while nobody read comes in one piece."""
    expected = server.engine.generate(PROMPTS[1], greedy(100, ignore_eos=True)).text

    async def slowly() -> str:
        async with connected(server) as client:
            text = ""
            body = completion(PROMPTS[1], max_tokens=100, ignore_eos=True, stream=True)
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        await asyncio.sleep(0.02)
            return text

    assert asyncio.run(slowly()) == expected
