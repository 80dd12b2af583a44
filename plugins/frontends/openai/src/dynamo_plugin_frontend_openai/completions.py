"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynamo_core.protocol.records import COMPLETIONS

from dynamo_plugin_frontend_openai.generation import Ask, GenerationEndpoint, Renderer
from dynamo_plugin_frontend_openai.preprocess import Prompt, text_prompts
from dynamo_plugin_frontend_openai.render_completions import CompletionRenderer
from dynamo_plugin_frontend_openai.requests import fields
from dynamo_plugin_frontend_openai.requests.completions import CompletionRequest, parse_completion

if TYPE_CHECKING:
    from dynamo_core.contracts.frontend import ServedModel

    from dynamo_plugin_frontend_openai.render import Identity


class CompletionAsk(Ask):
    """A checked completion request."""

    def __init__(self, raw: dict[str, Any]) -> None:
        request, self._inputs = parse_completion(raw)
        self.completion: CompletionRequest = request
        super().__init__(raw, request)

    def check_for_tokens(self) -> None:
        """Refuses suffixes and the like."""
        fields.check_passive(self.raw, fields.COMPLETIONS)

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """Each prompt of the batch."""
        return await text_prompts(self._inputs, model, "prompt")

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> Renderer:
        """Completion chunks and bodies."""
        echoes: list[str] = []
        for prompt in prompts:
            # An engine that takes text was given the wish and repeats the prompt itself.
            echo = self.completion.echo and model.card.model_input != "text"
            text = "" if not echo else prompt.text
            echoes += [model.tokenizer.decode(prompt.token_ids) if text is None else text] * self.completion.choices
        wanted = self.completion.alternatives is not None
        return CompletionRenderer(identity, echoes, model.tokenizer, logprobs=wanted)


class CompletionEndpoint(GenerationEndpoint[CompletionAsk]):
    """Text completions."""

    ENDPOINT = "completions"
    MODEL_TYPE = COMPLETIONS
    ID_PREFIX = "cmpl-"

    def check(self, raw: dict[str, Any]) -> CompletionAsk:
        """Checks a completion body."""
        return CompletionAsk(raw)
