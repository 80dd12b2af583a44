"""Text completions as chunks and as one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_core.text.tokenizer import Tokenizer

from dynamo_plugin_frontend_openai.choices import Choice
from dynamo_plugin_frontend_openai.logprobs import CompletionLogprobs
from dynamo_plugin_frontend_openai.render import Collected, Identity, encode, head, usage_chunk

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
        self._logprobs = [CompletionLogprobs(tokenizer) for _ in echoes] if logprobs else None
        self._head = head(identity, _KIND)
        self._prefix = b'%b{"text":"' % self._head
        self._tails = [b'","index":%d,"logprobs":' % index for index in range(len(echoes))]
        self._text_tails = [tail + b'null,"finish_reason":null}]}\n\n' for tail in self._tails]

    def opening(self, choice: Choice) -> bytes:
        """The prompt, if it is to be repeated."""
        echo = self._echoes[choice.index]
        return self._prefix + encode(echo)[1:-1] + self._text_tails[choice.index] if echo else b""

    def text(self, choice: Choice, text: str) -> bytes:
        """A piece of text."""
        if choice.scored is None:
            return self._prefix + encode(text)[1:-1] + self._text_tails[choice.index]
        return b'%b%b%b%b,"finish_reason":null}]}\n\n' % (
            self._prefix,
            encode(text)[1:-1],
            self._tails[choice.index],
            encode(self.logprobs(choice)),
        )

    def delta(self, choice: Choice, delta: dict[str, Any]) -> bytes:
        """A delta that the engine made: its text."""
        return self.text(choice, str(delta.get("text") or ""))

    def finish(self, choice: Choice) -> bytes:
        """An empty text with the reason."""
        reason = (choice.finish_reason or "stop").encode()
        return b'%b%bnull,"finish_reason":"%b"}]}\n\n' % (self._prefix, self._tails[choice.index], reason)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, without choices."""
        return usage_chunk(self._head, usage)

    def logprobs(self, choice: Choice) -> Any:
        """The `logprobs` object of the choice's last item."""
        if self._logprobs is None or choice.scored is None:
            return None
        return self._logprobs[choice.index].render(choice.scored)

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> bytes:
        """The whole answer as JSON."""
        identity = self._identity
        body = {
            "id": identity.id,
            "object": _KIND,
            "created": identity.created,
            "model": identity.model,
            "choices": [
                {
                    "text": self._echoes[item.choice.index] + item.text,
                    "index": item.choice.index,
                    "logprobs": _join(item.logprobs),
                    "finish_reason": item.choice.finish_reason or "stop",
                }
                for item in collected
            ],
            "usage": usage,
        }
        if nvext is not None:
            body["nvext"] = nvext
        return encode(body)


def _join(pieces: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    if not pieces:
        return None
    return {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}
