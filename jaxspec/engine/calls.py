"""What the methods of an engine that take prompts have in common."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxspec.engine.event_stream import EventStream, StreamEvent
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.requests.chats import ChatOptions, Messages, need_template, read_chat
from jaxspec.engine.requests.failures import Errors, check_errors, failure_of, raise_refusals
from jaxspec.engine.requests.output import RequestOutput, output_of
from jaxspec.engine.requests.prompts import Prompt, ReadPrompt, read_prompt
from jaxspec.engine.requests.request import Increment, Request
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.ledger import found_tokens
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.schedule.refusals import never_fits
from jaxspec.engine.setup.ahead import Ahead
from jaxspec.engine.setup.warmup import make_first_programs
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.stream import TextStream, stop_scan
from jaxspec.text.tokenizer import Tokenizer


class Calls:
    """Turns prompts into queued requests, and what steps add to these into events and outputs."""

    loop: Loop
    models: Models
    """The models as the caller passed them; the engine may add proposers without weights."""
    tokenizer: Tokenizer | None
    options: EngineOptions
    chat_template: ChatTemplate | None
    _ahead: Ahead
    _numbers: Iterator[int]

    def _submit(self, prompts: Sequence[ReadPrompt], params: Sequence[SamplingParams]) -> list[int]:
        """Queues all of these prompts or, if one cannot run, none. Returns their requests' ids."""
        requests, refusals = self._requests(prompts, params)
        if refused := [index for index, reason in enumerate(refusals) if reason is not None]:
            which = f"prompt {refused[0]}: " if len(prompts) > 1 else ""
            raise UsageError(f"{which}{refusals[refused[0]]}")
        ids = [request.id for request in requests]
        try:
            self.loop.submit(requests, refusals)
            self._make_ahead(requests)
            return ids
        except BaseException:
            self.loop.abandon(ids)
            raise

    def _outputs(
        self,
        prompts: Sequence[ReadPrompt],
        params: Sequence[SamplingParams],
        errors: Errors,
        of_list: bool,
    ) -> list[RequestOutput]:
        stream = self._stream(prompts, params, errors, of_list, raises=False)
        outputs = {e.index: e.output for e in stream if e.output is not None}
        if errors == "raise" and (failure := failure_of(outputs, len(prompts))):
            raise failure
        return [outputs[index] for index in range(len(outputs))]

    def _stream(
        self,
        prompts: Sequence[ReadPrompt],
        params: Sequence[SamplingParams],
        errors: Errors,
        of_list: bool,
        raises: bool,
    ) -> EventStream:
        check_errors(errors)
        requests, refusals = self._requests(prompts, params)
        if errors == "raise":
            raise_refusals(refusals, of_list)
        if self._made_first_programs(requests, refusals):
            now = self.loop.device.clock.now()
            requests = [dataclasses.replace(one, submitted_at=now) for one in requests]
        ids = [request.id for request in requests]
        stream = EventStream(self.loop, self._event, ids, raises)
        try:
            self.loop.submit(requests, refusals)
            self._make_ahead([one for one, refusal in zip(requests, refusals) if refusal is None])
            return stream
        except BaseException:
            stream.close()
            raise

    def _made_first_programs(
        self, requests: Sequence[Request], refusals: Sequence[str | None]
    ) -> bool:
        """If the engine is idle, makes the programs for the first steps side by side, which is
        faster than making each when it is needed. Returns whether there was anything to do."""
        now = self.loop.current
        run = [request for request, refusal in zip(requests, refusals) if refusal is None]
        if now.running or now.waiting or not any(one.params.max_tokens > 1 for one in run):
            return False
        prompts = [request.prompt[found_tokens(now, request) :] for request in run]
        draws = any(request.draws for request in run)
        scores = any(request.reads_whole_prompt for request in run)
        return make_first_programs(self.loop.device, self.loop.plan, prompts, draws, scores)

    def _make_ahead(self, requests: Sequence[Request]) -> None:
        """Begins to make, in a thread, the programs that these and later requests may need."""
        if any(request.params.max_tokens > 1 for request in requests):
            prompts = [request.prompt for request in requests]
            draws = any(request.draws for request in requests)
            scores = any(request.reads_whole_prompt for request in requests)
            self._ahead.begin(self.loop.device, prompts, draws, scores)

    def _event(self, index: int, increment: Increment) -> StreamEvent:
        output = None
        if increment.ended is not None:
            synthetic = self.loop.device.models.synthetic
            output = output_of(increment.ended, self.loop.plan.block_size - 1, synthetic)
        new, of_prompt = increment.gained, increment.prompt_logprobs
        return StreamEvent(index, new.token_ids, new.text, output, new.logprobs, of_prompt)

    def _read(self, prompts: Sequence[Prompt]) -> list[ReadPrompt]:
        vocab_size = self.models.target.vocab_size
        return [read_prompt(prompt, self.tokenizer, vocab_size) for prompt in prompts]

    def _read_chats(self, chats: Sequence[Messages], options: ChatOptions) -> list[ReadPrompt]:
        template = need_template(self.chat_template, self.tokenizer)
        vocab_size = self.models.target.vocab_size
        return [read_chat(one, template, self.tokenizer, vocab_size, options) for one in chats]

    def _requests(
        self, prompts: Sequence[ReadPrompt], params: Sequence[SamplingParams]
    ) -> tuple[list[Request], list[str | None]]:
        """The requests, and for each of them the reason why it can never run, or None."""
        self.loop.refuse_if_closed()
        pairs = zip(prompts, params, strict=True)
        requests = [self._request(next(self._numbers), *pair) for pair in pairs]
        reasons = [one.refusal or self._refusal(r) for one, r in zip(prompts, requests)]
        return requests, reasons

    def _request(self, number: int, prompt: ReadPrompt, params: SamplingParams) -> Request:
        own = frozenset(() if params.ignore_eos else self.models.target.eos_token_ids)
        return Request(
            id=number,
            prompt=prompt.ids,
            text_prompt=prompt.text,
            cache_salt=prompt.cache_salt,
            params=params,
            stop_ids=own | frozenset(params.stop_token_ids),
            end_ids=own,
            seed=(self.options.seed + number) % 2**32 if params.seed is None else params.seed,
            stream=TextStream(),
            scan=stop_scan(params.stop),
            submitted_at=self.loop.device.clock.now(),
            draws=params.draws,
        )

    def _refusal(self, request: Request) -> str | None:
        if request.params.stop and self.tokenizer is None:
            return "stop needs text but the engine has no tokenizer; use stop_token_ids"
        limit = self.options.max_model_len
        return never_fits(request, self.loop.plan, self.loop.ledger.book, limit)
