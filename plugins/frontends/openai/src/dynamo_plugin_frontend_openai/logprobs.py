"""Log-probabilities in the two shapes of the OpenAI API, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from dynamo_core import Tokenizer
from dynamo_generation.choices.logprob_buffer import Scored

encode = msgspec.json.Encoder().encode

#: The lists of a text completion's `logprobs`.
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
#: Tokens whose JSON is kept, of one answer: the alternatives of a position are often those of another.
_KEPT = 4096


class _Known(dict[int, tuple[bytes, bytes]]):
    """A token's part of the JSON of any position, made on first use."""

    def __init__(self, make: Callable[[int], tuple[bytes, bytes]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> tuple[bytes, bytes]:
        if len(self) >= _KEPT:
            self.clear()
        made = self[token_id] = self._make(token_id)
        return made


class ChatLogprobs:
    """The shape of chat completions: a list of tokens, each with its bytes and its alternatives."""

    __slots__ = ("_known", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        #: By token: what stands before its log-probability, and behind it.
        self._known = _Known(self._around)

    def fields(self, scored: Scored) -> dict[str, bytes]:
        """Return the values of the lists of the `logprobs` object by name, joined."""
        return {"content": self.field("content", scored)}

    def field(self, name: str, scored: Scored) -> bytes:
        """Return the values of the list of this name, joined: there is one list."""
        known = self._known
        entries: list[bytes] = []
        for token_id, logprob, tops in zip(scored.token_ids, scored.log_probs, scored.top_logprobs, strict=True):
            alternatives: list[bytes] = []
            for top in tops:
                before, behind = known[top.token_id]
                alternatives.append(b"%b%b%b}" % (before, encode(top.logprob), behind))
            before, behind = known[token_id]
            entries.append(b'%b%b%b,"top_logprobs":[%b]}' % (before, encode(logprob), behind, b",".join(alternatives)))
        return b",".join(entries)

    def ready(self, scores: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the same of an object that an engine has made."""
        return {"content": joined(scores.get("content") or ())}

    def render(self, scored: Scored) -> bytes:
        """Return the `logprobs` object of these tokens."""
        return b'{"content":[%b],"refusal":null}' % self.field("content", scored)

    def _around(self, token_id: int) -> tuple[bytes, bytes]:
        data = self._tokenizer.token_bytes(token_id)
        token = encode(data.decode(errors="replace"))
        return b'{"token":%b,"logprob":' % token, b',"bytes":%b' % encode(list(data))


class CompletionLogprobs:
    r"""The shape of text completions: parallel lists. `text_offset` counts characters of the choice's text.

    A token that is only part of a character is shown as ``bytes:\xe2\x82``, as in the original API: alternatives are
    told by their texts, which must differ.
    """

    __slots__ = ("_known", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        #: By token: its text, and the same as the name of a field.
        self._known = _Known(self._texts)

    def fields(self, scored: Scored) -> dict[str, bytes]:
        """Return the values of the lists of the `logprobs` object by name, joined."""
        return {name: self.field(name, scored) for name in _LISTS}

    def field(self, name: str, scored: Scored) -> bytes:
        """Return the values of the list of this name, joined."""
        match name:
            case "tokens":
                return self._tokens(scored)
            case "token_logprobs":
                return encode(list(scored.log_probs))[1:-1]
            case "top_logprobs":
                return self._alternatives(scored)
            case _:
                return encode(list(scored.offsets))[1:-1]

    def ready(self, scores: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the same of an object that an engine has made."""
        return {name: joined(values or ()) for name, values in scores.items()}

    def render(self, scored: Scored) -> bytes:
        """Return the `logprobs` object of these tokens."""
        return b'{"tokens":[%b],"token_logprobs":%b,"top_logprobs":[%b],"text_offset":%b}' % (
            self._tokens(scored),
            encode(scored.log_probs),
            self._alternatives(scored),
            encode(scored.offsets),
        )

    def _tokens(self, scored: Scored) -> bytes:
        known = self._known
        return b",".join([known[token_id][0] for token_id in scored.token_ids])

    def _alternatives(self, scored: Scored) -> bytes:
        known = self._known
        told: list[bytes] = []
        for tops in scored.top_logprobs:
            # Two alternatives may have one text: as the names of fields they are one.
            named = {known[top.token_id][1]: encode(top.logprob) for top in tops}
            told.append(b"{%b}" % b",".join([name + number for name, number in named.items()]))
        return b",".join(told)

    def _texts(self, token_id: int) -> tuple[bytes, bytes]:
        data = self._tokenizer.token_bytes(token_id)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        made = encode(text)
        return made, made + b":"


def joined(values: Iterable[Any]) -> bytes:
    """Return values as in a list of JSON, without its brackets."""
    return encode(list(values))[1:-1]
