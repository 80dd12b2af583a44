"""Text completions as chunks and as one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_core import Tokenizer
from dynamo_generation.answers.render import (
    SCORES,
    Collected,
    Identity,
    Pieces,
    body_of,
    encode,
    extension_chunk,
    head,
    usage_chunk,
    weight,
)
from dynamo_generation.choices.choice import Choice, Piece

from dynamo_plugin_frontend_openai.logprobs import CompletionLogprobs

_KIND = "text_completion"


class CompletionRenderer:
    """Makes the chunks and the body of a text completion.

    `echoes` holds for each choice the text to begin with: its prompt if the client wants it repeated, else nothing.
    """

    def __init__(
        self, identity: Identity, echoes: Sequence[str], tokenizer: Tokenizer, *, logprobs: bool = False
    ) -> None:
        self._identity = identity
        self._echoes = echoes
        self._logprobs = CompletionLogprobs(tokenizer) if logprobs else None
        self._head = head(identity, _KIND)
        self._prefix = b'%b{"text":"' % self._head
        self._tails = [b'","index":%d,"logprobs":' % index for index in range(len(echoes))]
        self._text_tails = [tail + b'null,"finish_reason":null}]}\n\n' for tail in self._tails]

    def leading_events(self, choice: Choice) -> bytes:
        """Return the prompt, if it is to be repeated."""
        echo = self._echoes[choice.index]
        return self._prefix + encode(echo)[1:-1] + self._text_tails[choice.index] if echo else b""

    def around(self, choice: Choice) -> tuple[bytes, bytes]:
        """Return what stands around a text."""
        return self._prefix, self._text_tails[choice.index]

    def piece(self, piece: Piece) -> bytes:
        """Return a piece of text. A ready delta has the form of chat; here its text counts."""
        index, text = piece.choice.index, piece.text
        scores = None
        if self._logprobs is not None:
            if piece.scored is not None:
                scores = self._logprobs.render(piece.scored)
            elif piece.logprobs is not None:
                scores = encode(piece.logprobs)
        if scores is not None:
            return b'%b%b%b%b,"finish_reason":null}]}\n\n' % (
                self._prefix,
                encode(text)[1:-1],
                self._tails[index],
                scores,
            )
        return self._prefix + encode(text)[1:-1] + self._text_tails[index] if text else b""

    def finish(self, choice: Choice) -> bytes:
        """Return an empty text with the reason."""
        reason = (choice.finish_reason or "stop").encode()
        return b'%b%bnull,"finish_reason":"%b"}]}\n\n' % (self._prefix, self._tails[choice.index], reason)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the last chunk, without choices."""
        return usage_chunk(self._head, usage)

    def extension(self, values: dict[str, Any]) -> bytes:
        """Return a chunk without choices whose `nvext` holds annotations."""
        return extension_chunk(self._head, values)

    def add(self, collected: Collected, piece: Piece) -> int:
        """Add a piece to the text of its choice. Give about how many bytes that takes."""
        if piece.text:
            collected.parts.append(piece.text)
        size = weight(piece)
        if piece.scored is not None:
            collected.scored += len(piece.scored.log_probs)
            collected.likelihood = sum(piece.scored.log_probs, collected.likelihood)
            if self._logprobs is not None:
                size += collected.add_scored(piece.scored, self._logprobs)
        elif piece.logprobs is not None and self._logprobs is not None:
            size += collected.add_scores(self._logprobs.ready(piece.logprobs))
        return size

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> Pieces:
        """Return the whole answer as JSON, in pieces."""
        choices = [self._choice(item) for item in collected]
        whole = self._identity.of(_KIND) | {"choices": choices, "usage": usage}
        if nvext is not None:
            whole["nvext"] = nvext
        return body_of(whole, collected, self._logprobs)

    def _choice(self, item: Collected) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "text": self._echoes[item.choice.index] + item.text,
            "index": item.choice.index,
            "logprobs": None if item.scores is None else SCORES,
            "finish_reason": item.choice.finish_reason or "stop",
        }
        if item.token_ids is not None:
            choice |= {"token_ids": item.token_ids, "prompt_token_ids": item.prompt_token_ids}
        return choice
