"""The program of a process that lowers kernels. It has no GPU and needs none."""

import os
import pickle
import sys
from typing import BinaryIO

from pallas_kernels.kept.surroundings import adopt, surroundings


def main() -> None:
    """Answers until standard input is closed. An empty answer says that this process cannot lower
    the kernel, or would lower it in another way than the process that asks."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything that is printed goes to stderr, not into the answers
    while (request := _read(sys.stdin.buffer)) is not None:
        answer = _answer(request)
        answers.write(len(answer).to_bytes(8) + answer)
        answers.flush()


def _read(requests: BinaryIO) -> bytes | None:
    length = requests.read(8)
    return requests.read(int.from_bytes(length)) if len(length) == 8 else None


def _answer(request: bytes) -> bytes:
    try:
        settings, expected_surroundings, kernel = pickle.loads(request)
        adopt(settings)
        return kernel.lower() if surroundings() == expected_surroundings else b""
    except Exception:  # the process that asks lowers the kernel itself, and raises what is wrong
        return b""
