"""Chat completions as chunks and as one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_core.text.tokenizer import Tokenizer

from dynamo_plugin_frontend_openai.choices import Choice, Piece
from dynamo_plugin_frontend_openai.logprobs import ChatLogprobs
from dynamo_plugin_frontend_openai.render import Collected, Identity, encode, head, usage_chunk


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

    def opening(self, choice: Choice) -> bytes:
        """The delta that names the role."""
        return b'%b{"role":"assistant"}%b' % (self._prefixes[choice.index], self._tail)

    def around(self, choice: Choice) -> tuple[bytes, bytes]:
        """What stands around the text of a delta."""
        return self._texts[choice.index], self._text_tail

    def piece(self, piece: Piece) -> bytes:
        """A delta with content, or the one that the engine made."""
        choice, text, scored, delta, _ = piece
        if delta is not None:
            return self._prefixes[choice.index] + encode(delta) + self._tail
        if scored is not None and self._logprobs is not None:
            return b'%b%b"},"logprobs":%b,"finish_reason":null}]}\n\n' % (
                self._texts[choice.index],
                encode(text)[1:-1],
                encode(self._logprobs.render(scored)),
            )
        return self._texts[choice.index] + encode(text)[1:-1] + self._text_tail if text else b""

    def finish(self, choice: Choice) -> bytes:
        """An empty delta with the reason."""
        return b'%b{}%b,"finish_reason":"%b"}]}\n\n' % (
            self._prefixes[choice.index],
            self._no_scores,
            (choice.finish_reason or "stop").encode(),
        )

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, without choices."""
        return usage_chunk(self._head, usage)

    def add(self, collected: Collected, piece: Piece) -> None:
        """Adds a piece to the message of its choice."""
        if piece.delta is not None:
            collected.deltas.append(piece.delta)
        elif piece.text:
            collected.parts.append(piece.text)
        if piece.scored is not None and self._logprobs is not None:
            collected.logprobs.append(self._logprobs.render(piece.scored))

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> bytes:
        """The whole answer as JSON."""
        identity = self._identity
        body = {
            "id": identity.id,
            "object": "chat.completion",
            "created": identity.created,
            "model": identity.model,
            "choices": [self._choice(item) for item in collected],
            "usage": usage,
        }
        if nvext is not None:
            body["nvext"] = nvext
        return encode(body)

    def _choice(self, item: Collected) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": item.choice.index, "message": _message(item)}
        if self._logprobs is not None:
            content = [entry for part in item.logprobs for entry in part["content"]]
            choice["logprobs"] = {"content": content, "refusal": None} if item.logprobs else None
        choice["finish_reason"] = item.choice.finish_reason or "stop"
        return choice


def _message(item: Collected) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": item.text}
    for delta in item.deltas:
        for name, value in delta.items():
            if name != "role":
                _fold(message, name, value)
    return message


def _fold(into: dict[str, Any], name: str, value: Any) -> None:
    """Adds a piece of a field to what there is of it: texts are joined, objects and indexed lists piece by piece."""
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
