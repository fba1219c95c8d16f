"""Reads the body of a request, up to a limit."""

from typing import Any

from starlette.requests import ClientDisconnect, Request

from jaxspec.serving.fields import json_object
from jaxspec.serving.refusals import Refusal

LONGEST_BODY = 64 * 2**20
"""Bytes of the longest body, many times as long as a prompt that fills the longest context."""
JSON = "application/json"


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body. The content type must be JSON, because browsers let a web page
    of any origin send plain text or forms without asking the server first."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind != JSON:
        raise Refusal(
            415,
            f"the content type is {kind[:100]!r}; expected {JSON}: add the header "
            f"'Content-Type: {JSON}'",
        )
    return json_object(await _body(request))


async def _body(request: Request) -> bytes:
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > LONGEST_BODY:
                raise Refusal(413, f"the body is longer than {LONGEST_BODY} bytes; send less")
            pieces.append(piece)
    except ClientDisconnect:
        raise Refusal(400, "the client left before its request was read") from None
    return b"".join(pieces)
