"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from typing import Any

from dynamo_core.text.tokenizer import Tokenizer

from dynamo_plugin_frontend_openai.scores import Scored


class ChatLogprobs:
    """The shape of chat completions: a list of tokens, each with its bytes and its alternatives."""

    __slots__ = ("_tokenizer",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, scored: Scored) -> dict[str, Any]:
        """The `logprobs` object of these tokens."""
        content = []
        for token_id, logprob, tops in zip(scored.token_ids, scored.log_probs, scored.top_logprobs, strict=True):
            entry = self._entry(token_id, logprob)
            entry["top_logprobs"] = [self._entry(top.token_id, top.logprob) for top in tops]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class CompletionLogprobs:
    """The shape of text completions: parallel lists. `text_offset` counts characters of the choice's text.

    A token that is only part of a character is shown as ``bytes:\\xe2\\x82``, as in the original API: alternatives are
    told by their texts, which must differ.
    """

    __slots__ = ("_tokenizer",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, scored: Scored) -> dict[str, Any]:
        """The `logprobs` object of these tokens."""
        return {
            "tokens": [self._text(token_id) for token_id in scored.token_ids],
            "token_logprobs": list(scored.log_probs),
            "top_logprobs": [{self._text(top.token_id): top.logprob for top in tops} for tops in scored.top_logprobs],
            "text_offset": list(scored.offsets),
        }

    def _text(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
