"""``POST /v1/completions``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynamo_core.errors import NotSupported
from dynamo_core.protocol import COMPLETIONS
from dynamo_generation.endpoints.generation import GenerationEndpoint
from dynamo_generation.endpoints.parsed_request import ParsedRequest, Renderer
from dynamo_generation.prompts.preprocess import Prompt, text_prompts
from dynamo_generation.requests import fields
from dynamo_generation.requests.completions import CompletionRequest, parse_completion

from dynamo_plugin_frontend_openai.render_completions import CompletionRenderer

if TYPE_CHECKING:
    from dynamo_core import ServedModel
    from dynamo_generation.answers.render import Collected, Identity


class ParsedCompletion(ParsedRequest):
    """A checked completion request."""

    def __init__(self, raw: dict[str, Any]) -> None:
        checked = parse_completion(raw)
        self._inputs = checked.prompts
        self.completion: CompletionRequest = checked.request
        super().__init__(raw, checked.request, checked.refusal)

    def body_of_one(self, prompt: int, choice: int) -> dict[str, Any]:
        """Return the body that asks for one answer to one of the prompts."""
        return super().body_of_one(prompt, choice) | {"prompt": self._inputs[prompt]}

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """Return each prompt of the batch."""
        special = self.completion.add_special_tokens is not False
        return await text_prompts(self._inputs, model, "prompt", add_special_tokens=special)

    def best_of(self, collected: Sequence[Collected], model: ServedModel) -> Sequence[Collected]:
        """Return the best answers to each prompt: those whose tokens are the likeliest on average.

        Raises:
            NotSupported: the engine does not say how likely its tokens are.
        """
        made, wanted = self.completion.candidates, self.completion.choices
        if not self.completion.selects or model.card.model_input == "text":
            # An engine that takes text was given the wish and chooses itself.
            return collected
        if not all(item.scored for item in collected if item.parts):
            raise NotSupported("best_of needs log-probabilities, which the engine of this model does not give")
        best: list[Collected] = []
        for first in range(0, len(collected), made):
            ranked = sorted(collected[first : first + made], key=_likelihood, reverse=True)
            best += ranked[:wanted]
        for index, item in enumerate(best):
            item.choice.index = index
        return best

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> Renderer:
        """Return completion chunks and bodies."""
        echoes: list[str] = []
        for prompt in prompts:
            # An engine that takes text was given the wish and repeats the prompt itself.
            echo = self.completion.echo and model.card.model_input != "text"
            text = "" if not echo else prompt.text
            echoes += [model.tokenizer.decode(prompt.token_ids) if text is None else text] * self.completion.choices
        wanted = self.completion.logprobs is not None
        renderer = CompletionRenderer(identity, echoes, model.tokenizer, logprobs=wanted)
        return self.with_tokens(renderer, prompts, model, beside=False)


def _likelihood(item: Collected) -> float:
    """Return the mean log-probability of its tokens."""
    return item.likelihood / item.scored if item.scored else -math.inf


class CompletionEndpoint(GenerationEndpoint[ParsedCompletion]):
    """Text completions."""

    ENDPOINT = "completions"
    MODEL_TYPE = COMPLETIONS
    BODY = CompletionRequest
    PASSIVE = fields.COMPLETIONS
    ID_PREFIX = "cmpl-"

    def check(self, raw: dict[str, Any]) -> ParsedCompletion:
        """Check a completion body."""
        return ParsedCompletion(raw)
