"""The server's answers: from chunks of the OpenAI API to engine items."""

from __future__ import annotations

from typing import Any

import msgspec
from dynamo_core import BackendError, CompletionUsage, FinishReason, LLMEngineOutput
from dynamo_core.protocol import Unreadable, read

_chunks = msgspec.json.Decoder()

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
    # The frontend calls it that again, as it sees the calls.
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
}


class ServerError(Exception):
    """The server has put an error into its stream: its ``error`` object."""

    def __init__(self, error: Any) -> None:
        super().__init__("the server reported an error in its stream")
        self.error = error


class ResponseReader:
    """Reads the chunks of one answer with `choices` choices.

    The usage comes after everything else, and nothing may follow a terminal: the last terminal waits for it.
    """

    __slots__ = ("_choices", "_left", "_terminal", "_unheard", "_usage", "complete")

    def __init__(self, choices: int) -> None:
        self._left = set(range(choices))
        #: Choices of which nothing has come.
        self._unheard = set(range(choices))
        self._choices = choices
        self._terminal: LLMEngineOutput | None = None
        self._usage: CompletionUsage | None = None
        #: Whether the stream has ended as it should.
        self.complete = False

    def read(self, data: bytes) -> list[LLMEngineOutput]:
        """Return the items that one chunk becomes.

        Raises:
            ServerError: it is an error.
            BackendError.StreamIncomplete: it cannot be understood.
        """
        try:
            chunk = read(_chunks, data)
        except Unreadable as error:
            raise BackendError.StreamIncomplete("the server sent an event that is no JSON") from error
        if not isinstance(chunk, dict):
            raise BackendError.StreamIncomplete("the server sent an event that is no object")
        if chunk.get("error"):
            raise ServerError(chunk["error"])
        usage = _usage(chunk.get("usage"))
        if usage is not None:
            self._usage = usage
        items: list[LLMEngineOutput] = []
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._choice(choice, items)
        if usage is not None and items and self._choices == 1:
            items[-1].completion_usage = usage
        if usage is not None and self._terminal is not None:
            items += self._last()
        return items

    def end(self, *, done: bool = False) -> list[LLMEngineOutput]:
        """Return what was held back. The stream has ended; `done` is whether the server said so.

        If it did, what it gave no reason for has stopped.

        Raises:
            BackendError.StreamIncomplete: a choice has not ended.
        """
        if self._left and (not done or self._unheard):
            raise BackendError.StreamIncomplete("the server ended its stream before the answer was complete")
        stopped = [LLMEngineOutput(index=index, finish_reason=FinishReason.STOP) for index in sorted(self._left)]
        self._left.clear()
        if stopped:
            self._terminal = stopped.pop()
        self.complete = True
        return stopped + self._last()

    def _last(self) -> list[LLMEngineOutput]:
        terminal, self._terminal = self._terminal, None
        if terminal is None:
            return []
        terminal.completion_usage = self._usage
        return [terminal]

    def _choice(self, choice: Any, items: list[LLMEngineOutput]) -> None:
        index = choice.get("index", 0) if isinstance(choice, dict) else None
        if not isinstance(index, int):
            index = None
        made = _split(choice) if isinstance(choice, dict) else []
        if index not in self._left:
            if not made and isinstance(index, int) and 0 <= index < self._choices:
                # Some servers repeat a choice that has ended, without anything in it.
                return
            raise BackendError.StreamIncomplete(f"the server answered for choice {index!r}, which was not asked for")
        self._unheard.discard(index)
        for item in made:
            item.index = index
        items += made
        reason = choice.get("finish_reason")
        if reason is None:
            return
        self._left.discard(index)
        terminal = LLMEngineOutput(index=index, finish_reason=_REASONS.get(str(reason), FinishReason.STOP))
        stop = choice.get("stop_reason")
        if isinstance(stop, str | int):
            terminal.stop_reason = stop
        if self._left:
            items.append(terminal)
        else:
            self._terminal = terminal


def _split(choice: dict[str, Any]) -> list[LLMEngineOutput]:
    """Return what a choice says in one chunk: reasoning, then text, then the rest.

    Text alone is cheapest to pass on.
    """
    delta = choice.get("delta")
    rest = dict(delta) if isinstance(delta, dict) else {"content": choice.get("text")}
    rest.pop("role", None)
    reasoning = rest.pop("reasoning_content", None) or rest.pop("reasoning", None)
    rest.pop("reasoning", None)
    text = rest.pop("content") if isinstance(rest.get("content"), str) else None
    rest = {name: value for name, value in rest.items() if value is not None and value != []}
    made: list[LLMEngineOutput] = []
    if reasoning:
        made.append(LLMEngineOutput(delta={"reasoning_content": reasoning}))
    if text:
        made.append(LLMEngineOutput(text=text))
    if rest:
        made.append(LLMEngineOutput(delta=rest))
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict) and any(logprobs.values()):
        if not made:
            made.append(LLMEngineOutput(text=""))
        made[-1].text_logprobs = logprobs
    return made


def _usage(reported: Any) -> CompletionUsage | None:
    if not isinstance(reported, dict):
        return None
    prompt, completion = _count(reported.get("prompt_tokens")), _count(reported.get("completion_tokens"))
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        cached_tokens=_detail(reported.get("prompt_tokens_details"), "cached_tokens"),
        reasoning_tokens=_detail(reported.get("completion_tokens_details"), "reasoning_tokens"),
    )


def _detail(details: Any, name: str) -> int | None:
    value = details.get(name) if isinstance(details, dict) else None
    return value if isinstance(value, int) else None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
