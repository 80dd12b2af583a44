"""An engine that answers every prompt with the prompt itself."""

import asyncio
from collections.abc import AsyncIterator

from dynamo_core import (
    EngineConfig,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    chunk,
    usage,
)
from pydantic import Field


class EchoConfig(PluginConfig):
    """The keys of the engine's section in the config file, beside `use`."""

    delay: float = Field(default=0.0, ge=0, description="Seconds between two tokens.")


class EchoEngine(LLMEngine):
    """Gives the tokens of the prompt back, one at a time, as far as `max_tokens` allows."""

    NAME = "echo"
    Config = EchoConfig
    config: EchoConfig

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.worker.model_name)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        prompt = request.token_ids
        limit = request.stop_conditions.max_tokens
        answer = prompt if limit is None else prompt[:limit]
        sent = 0
        while not ctx.is_stopped():
            if sent == len(answer):
                last = LLMEngineOutput.stop() if sent == len(prompt) else LLMEngineOutput.length()
                yield last.with_usage(usage(len(prompt), sent))
                return
            yield chunk.token(answer[sent])
            sent += 1
            await asyncio.sleep(self.config.delay)
        yield LLMEngineOutput.cancelled().with_usage(usage(len(prompt), sent))

    async def cleanup(self) -> None:
        pass
