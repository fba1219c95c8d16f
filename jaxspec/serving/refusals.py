"""Error answers: their status, their JSON and their headers."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
"""The type that an error of each status has in its JSON. The names are vLLM's."""
RETRY_SECONDS = 1
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
DO_NOT_RETRY: Mapping[str, str] = MappingProxyType({"x-should-retry": "false"})
"""Tells the openai package not to send the same request again, which would fail again."""


class Refusal(Exception):
    """Raised wherever a request cannot be fulfilled; it becomes the error answer."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        """The field of the request that is wrong."""
        self.headers = headers

    @property
    def body(self) -> bytes:
        return error_body(self.status, self.message, self.param)


def bad_request(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, message, param)


def unavailable(message: str) -> Refusal:
    """A refusal of what the server cannot do now but may be able to do soon."""
    return Refusal(503, message, headers={"Retry-After": str(RETRY_SECONDS)})


def failed(message: str) -> Refusal:
    """A refusal after the engine has failed in a way in which it would fail again."""
    return Refusal(500, message, headers=DO_NOT_RETRY)


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = KINDS.get(status, KINDS[500] if status >= 500 else KINDS[400])
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    return json.dumps(error_object(status, message, param)).encode()
