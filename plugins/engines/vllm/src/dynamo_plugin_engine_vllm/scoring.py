"""From texts to the inputs of a model that scores, and from its outputs to scores: vLLM's own way for each kind.

A cross-encoder reads a pair at once, an embedding model each text for itself, and some have a template.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dynamo_core import ScoreRequest

#: The processors of vLLM that make scores, by its names.
_KINDS = ("cross-encoder", "bi-encoder", "late-interaction")
_POOLING = "vllm.entrypoints.pooling"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scorer:
    """The parts of vLLM that its own server scores with."""

    processor: Any
    Context: Any
    Request: Any
    Output: Any

    @classmethod
    def load(cls, engine: Any, tasks: Sequence[str], template: str | None) -> Scorer | None:
        """Return the scorer of an engine that does not generate; None if its model cannot score. Imports for seconds.

        `template` is a file with the template of a pair, for models that need one. A model that vLLM cannot score with
        is still good for embeddings: that is a warning.
        """
        try:
            text = None if template is None else Path(template).read_text("utf-8")
            config = import_module("vllm.renderers.chat_utils").ChatTemplateConfig(chat_template=text)
            make = import_module(f"{_POOLING}.factories").init_pooling_io_processors
            made = make(tuple(tasks), engine.vllm_config, engine.renderer, config)
            processor = next((made[kind] for kind in _KINDS if kind in made), None)
            if processor is None:
                return None
            return cls(
                processor,
                import_module(f"{_POOLING}.typing").PoolingServeContext,
                import_module(f"{_POOLING}.scoring.protocol").ScoreQueriesDocumentsRequest,
                import_module("vllm.outputs").ScoringRequestOutput,
            )
        except Exception as error:
            log.warning("no scores of this model: %s: %s", type(error).__name__, error)
            return None

    async def render(self, request: ScoreRequest) -> Any:
        """Return a context of vLLM's with the inputs of the model, `engine_inputs`.

        Raises:
            Exception: vLLM's own: a text is too long, or a limit that it does not take.
        """
        asked = self.Request(
            queries=request.queries,
            documents=request.documents,
            max_tokens_per_query=request.max_tokens_per_query or 0,
            max_tokens_per_doc=request.max_tokens_per_doc or 0,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        context = self.Context(
            request=asked,
            model_name=request.model,
            request_id="",
            pooling_params=self.processor.create_pooling_params(asked),
            lora_request=None,
            priorities=None,
            prompt_extras={},
        )
        wanted = self.processor.get_request_factory_online(context)
        context.engine_inputs = await asyncio.gather(*map(self.processor.render_async, wanted))
        return context

    def scores(self, context: Any, outputs: Sequence[Any]) -> list[float]:
        """Return one score per document, from the outputs for the inputs of `context`."""
        context.final_res_batch = list(outputs)
        self.processor.post_process_online(context)
        return [self.Output.from_base(output).outputs.score for output in context.final_res_batch]
