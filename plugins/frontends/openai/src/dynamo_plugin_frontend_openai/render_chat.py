"""Chat completions as chunks and as one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_core import ContentDelta, ParserDelta, ReasoningDelta, Tokenizer, ToolCallArguments, ToolCallStart
from dynamo_generation.answers.render import (
    PIECE,
    SCORES,
    Collected,
    Identity,
    Pieces,
    body_of,
    encode,
    extension_chunk,
    head,
    usage_chunk,
    verdict_of,
    weight,
)
from dynamo_generation.choices.choice import Choice, Piece
from dynamo_generation.choices.logprob_buffer import Scored

from dynamo_plugin_frontend_openai.logprobs import ChatLogprobs


class ChatRenderer:
    """Makes the chunks and the body of a chat completion. `logprobs` is whether the client asked for them."""

    def __init__(self, identity: Identity, choices: int, tokenizer: Tokenizer, *, logprobs: bool = False) -> None:
        self._identity = identity
        self._logprobs = ChatLogprobs(tokenizer) if logprobs else None
        self._head = head(identity, "chat.completion.chunk")
        #: The bytes before the delta of each choice; after it come `_tail`, or something with a finish reason.
        self._prefixes = [b'%b{"index":%d,"delta":' % (self._head, index) for index in range(choices)]
        self._texts = [b'%b{"content":"' % prefix for prefix in self._prefixes]
        self._no_scores = b',"logprobs":null' if logprobs else b""
        self._tail = b'%b,"finish_reason":null}]}\n\n' % self._no_scores
        self._text_tail = b'"}' + self._tail

    def leading_events(self, choice: Choice) -> bytes:
        """Return the delta that names the role."""
        return b'%b{"role":"assistant"}%b' % (self._prefixes[choice.index], self._tail)

    def around(self, choice: Choice) -> tuple[bytes, bytes]:
        """Return what stands around the text of a delta."""
        return self._texts[choice.index], self._text_tail

    def piece(self, piece: Piece) -> bytes:
        """Return a delta with content, or the one that the engine made."""
        choice, text, scored, delta, _, parsed, logprobs, _ = piece
        if parsed is not None:
            return self._parsed(choice, parsed, scored)
        if logprobs is not None and self._logprobs is not None:
            body = encode({"content": text} if delta is None else delta)
            return b'%b%b,"logprobs":%b,"finish_reason":null}]}\n\n' % (
                self._prefixes[choice.index],
                body,
                encode(logprobs),
            )
        if delta is not None:
            return self._prefixes[choice.index] + encode(delta) + self._tail
        if scored is not None and self._logprobs is not None:
            return b'%b%b"},"logprobs":%b,"finish_reason":null}]}\n\n' % (
                self._texts[choice.index],
                encode(text)[1:-1],
                self._logprobs.render(scored),
            )
        return self._texts[choice.index] + encode(text)[1:-1] + self._text_tail if text else b""

    def _parsed(self, choice: Choice, deltas: Sequence[ParserDelta], scored: Scored | None) -> bytes:
        """Return a chunk for each delta.

        The first has the scores of all, which an empty one has if there is no other.
        """
        prefix, tail = self._prefixes[choice.index], self._tail
        bodies = [_delta(delta) for delta in deltas]
        if scored is None or self._logprobs is None:
            return b"".join([prefix + body + tail for body in bodies])
        first, *others = bodies or [b"{}"]
        scores = self._logprobs.render(scored)
        chunk = b'%b%b,"logprobs":%b,"finish_reason":null}]}\n\n' % (prefix, first, scores)
        return b"".join([chunk, *(prefix + body + tail for body in others)])

    def finish(self, choice: Choice) -> bytes:
        """Return an empty delta with the reason."""
        verdict = b"" if choice.verdict is None else b',"structured_output":%b' % encode(choice.verdict)
        return b'%b{}%b,"finish_reason":"%b"%b}]}\n\n' % (
            self._prefixes[choice.index],
            self._no_scores,
            (choice.finish_reason or "stop").encode(),
            verdict,
        )

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the last chunk, without choices."""
        return usage_chunk(self._head, usage)

    def extension(self, values: dict[str, Any]) -> bytes:
        """Return a chunk without choices whose `nvext` holds annotations."""
        return extension_chunk(self._head, values)

    def add(self, collected: Collected, piece: Piece) -> int:
        """Add a piece to the message of its choice. Give about how many bytes that takes."""
        if piece.parsed is None and piece.delta is None:
            collected.parts.append(piece.text)
            size = PIECE + len(piece.text)
        else:
            size = weight(piece)
            if piece.parsed is not None:
                collected.parsed += piece.parsed
            elif piece.delta is not None:
                collected.deltas.append(piece.delta)
        if self._logprobs is not None:
            if piece.scored is not None:
                size += collected.add_scored(piece.scored, self._logprobs)
            elif piece.logprobs is not None:
                size += collected.add_scores(self._logprobs.ready(piece.logprobs))
        return size

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> Pieces:
        """Return the whole answer as JSON, in pieces."""
        choices = [self._choice(item) for item in collected]
        whole = self._identity.of("chat.completion") | {"choices": choices, "usage": usage}
        # A chat has one prompt, which all of its choices share.
        if collected[0].prompt_token_ids is not None:
            whole["prompt_token_ids"] = collected[0].prompt_token_ids
        if nvext is not None:
            whole["nvext"] = nvext
        return (
            [encode(whole)] if self._logprobs is None else body_of(whole, collected, self._logprobs, b',"refusal":null')
        )

    def _choice(self, item: Collected) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": item.choice.index, "message": _message(item)}
        if self._logprobs is not None:
            choice["logprobs"] = None if item.scores is None else SCORES
        choice["finish_reason"] = item.choice.finish_reason or "stop"
        if item.token_ids is not None:
            choice["token_ids"] = item.token_ids
        return choice | verdict_of(item.choice)


def _delta(delta: ParserDelta) -> bytes:
    """Return a delta in the form of the API."""
    match delta:
        case ContentDelta(text):
            return b'{"content":%b}' % encode(text)
        case ReasoningDelta(text):
            return b'{"reasoning_content":%b}' % encode(text)
        case ToolCallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return encode({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
        case ToolCallArguments(index, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, encode(text))


def _parsed_message(deltas: Sequence[ParserDelta]) -> dict[str, Any]:
    """Return what the deltas of a whole answer make.

    Beside calls, content that is empty is null, as in the original API.
    """
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart():
                calls.append((delta, []))
            case ToolCallArguments(index, text):
                calls[index][1].append(text)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(arguments)}}
            for call, arguments in calls
        ]
    return message


def _message(item: Collected) -> dict[str, Any]:
    if item.parsed:
        return _parsed_message(item.parsed)
    message: dict[str, Any] = {"role": "assistant", "content": item.text}
    for delta in item.deltas:
        for name, value in delta.items():
            if name != "role":
                _fold(message, name, value)
    return message


def _fold(into: dict[str, Any], name: str, value: Any) -> None:
    """Add a piece of a field to what there is of it: texts are joined, objects and indexed lists piece by piece."""
    known = into.get(name)
    if known is None or value is None:
        if value is not None:
            into[name] = value
    elif isinstance(known, str) and isinstance(value, str) and name not in ("id", "type"):
        into[name] = known + value
    elif isinstance(known, dict) and isinstance(value, dict):
        for key, item in value.items():
            _fold(known, key, item)
    elif isinstance(known, list) and isinstance(value, list):
        _fold_list(known, value)
    else:
        into[name] = value


def _fold_list(known: list[Any], value: list[Any]) -> None:
    for item in value:
        index = item.get("index") if isinstance(item, dict) else None
        match = next((old for old in known if isinstance(old, dict) and old.get("index") == index), None)
        if index is None or match is None:
            known.append(item)
        else:
            for key, part in item.items():
                _fold(match, key, part)
