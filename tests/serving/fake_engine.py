"""An engine without models, for tests of the server around it."""

import threading
from types import SimpleNamespace

from jaxspec import Engine, EngineOptions


class FakeEngine(Engine):
    """Every request gets one token per step, in as many steps as `allowed` permits."""

    max_model_len = 100
    tokenizer = None
    chat_template = None
    options = EngineOptions(max_batch=2)
    models = SimpleNamespace(target=SimpleNamespace(vocab_size=10))

    def __init__(self) -> None:
        self.opening = threading.Event()
        """Opening the engine ends when this is set."""
        self.fails: BaseException | None = None
        """The exception that the next step raises."""
        self.submitted: list = []
        self.aborted: list[int] = []
        self.closed = False

    def open(self) -> "FakeEngine":
        assert self.opening.wait(60)
        if self.fails is not None:
            raise self.fails
        return self

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def most_tokens(self, prompt_tokens: int) -> int:
        return self.max_model_len - prompt_tokens

    def submit_all(self, prompts, params) -> list[int]:
        first = len(self.submitted) + 1
        self.submitted += zip(prompts, params, strict=True)
        return list(range(first, len(self.submitted) + 1))

    def abort(self, ids) -> None:
        self.aborted.extend(ids)

    def step(self, ids) -> list:
        threading.Event().wait(0.01)
        if self.fails is not None:
            raise self.fails
        return []
