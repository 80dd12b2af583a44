"""`TransformersEngine`: the engine contract over the library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import PurePath
from typing import ClassVar

from dynamo_core import (
    BackendError,
    CompletionUsage,
    DisaggregationMode,
    EngineConfig,
    FinishReason,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    WorkerConfig,
    usage,
)
from dynamo_core.errors import ConfigError

from dynamo_plugin_engine_transformers.config import TransformersConfig
from dynamo_plugin_engine_transformers.model_runner import ModelInfo, ModelRunner, Output
from dynamo_plugin_engine_transformers.request_sampling import RequestSampling, model_defaults, request_sampling


class TransformersEngine(LLMEngine):
    """Runs a model of a Hugging Face style folder in this process, many requests in one batch."""

    NAME: ClassVar[str] = "transformers"
    Config: ClassVar[type[PluginConfig]] = TransformersConfig
    config: TransformersConfig

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        super().__init__(config, worker)
        self._runner: ModelRunner | None = None
        self._info: ModelInfo | None = None
        self._defaults: Mapping[str, float] = {}
        self._draining = False

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model, in a thread.

        Raises:
            ConfigError: there is no model, or no library, or they do not go together.
            BackendError.EngineShutdown: the model does not fit into memory.
        """
        folder = self.worker.model_path
        if self.worker.disaggregation_mode is not DisaggregationMode.AGGREGATED:
            raise ConfigError("engine 'transformers' knows no prefill and decode roles: set disaggregation_mode to agg")
        if folder is None:
            raise ConfigError(
                f"workers.{self.worker.worker}.model.path: engine 'transformers' needs the model's folder: set it, "
                "or give --model PATH"
            )
        self._runner = runner = ModelRunner(self.config)
        info = await asyncio.to_thread(runner.load, folder, asyncio.get_running_loop())
        self._info = info
        self._defaults = await asyncio.to_thread(model_defaults, folder)
        return EngineConfig(
            model=self.worker.model_name or PurePath(folder).name,
            served_model_name=self.worker.served_model_name,
            context_length=info.context_length,
            kv_cache_block_size=info.block_size,
            total_kv_blocks=info.blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=info.batch_tokens,
        )

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        """Stream the answer; each item holds everything said since the one before.

        Raises:
            BackendError.InvalidArgument: an empty prompt, one that leaves no room in the context, a token id that there
                is not, or an option that this engine does not have.
            BackendError.EngineShutdown: not started, draining, or the library has failed.
        """
        runner, info = self._runner, self._info
        if runner is None or info is None or self._draining:
            raise BackendError.EngineShutdown("the engine does not run")
        sampling = request_sampling(
            request,
            vocabulary=info.vocabulary,
            defaults=self._defaults,
            caching=self.config.enable_prefix_caching,
        )
        limit = _limit(request, info.context_length)
        if ctx.is_stopped():
            yield LLMEngineOutput.cancelled().with_usage(usage(len(sampling.prompt), 0))
            return
        stream = _Stream()
        finished = False
        runner.submit(ctx.attempt_id, sampling, limit, stream.put)
        forget = ctx.on_stop(stream.wake)
        sent = 0
        try:
            while not finished:
                output = await stream.take()
                if ctx.is_stopped():
                    yield LLMEngineOutput.cancelled().with_usage(_usage(sampling, sent))
                    return
                if output is None:
                    continue
                if output.error is not None:
                    finished = True
                    raise _failure(output.error, runner)
                finished = output.finished
                item = _item(request, sampling, output, sent)
                # A stop string may end the answer before the last item.
                first = not sent
                sent += len(item.token_ids)
                if first or item.finish_reason is not None:
                    item.completion_usage = _usage(sampling, sent)
                yield item
        finally:
            forget()
            runner.release(ctx.attempt_id, finished=finished)

    async def drain(self) -> None:
        """Refuse new requests; those that run go on."""
        self._draining = True

    async def cleanup(self) -> None:
        """End the library's thread; streams that still run end with `EngineShutdown`."""
        self._draining = True
        runner, self._runner = self._runner, None
        if runner is not None:
            await asyncio.to_thread(runner.stop)


class _Stream:
    """A bridge from callbacks to a waiting task: only the newest output matters, for it holds all tokens."""

    __slots__ = ("_newest", "_waiter", "_woken")

    def __init__(self) -> None:
        self._newest: Output | None = None
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        """Put more of the answer."""
        self._newest = output
        self.wake()

    def wake(self) -> None:
        """Wake the reader."""
        self._woken = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> Output | None:
        """Return the newest output; None if it was only woken."""
        if not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._woken = False
        output, self._newest = self._newest, None
        return output


def _limit(request: PreprocessedRequest, context_length: int) -> int:
    """Return how many tokens may come out.

    Raises:
        BackendError.InvalidArgument: the prompt is empty, or leaves no room.
    """
    length = len(request.token_ids)
    if not length:
        raise BackendError.InvalidArgument("the prompt is empty", field="prompt")
    room = context_length - length
    if room < 1:
        raise BackendError.InvalidArgument(
            f"the prompt has {length} tokens and leaves no room for an answer: the context is {context_length} tokens",
            field="prompt",
        )
    requested = request.stop_conditions.max_tokens
    return room if requested is None else max(1, min(requested, room))


def _usage(sampling: RequestSampling, sent: int) -> CompletionUsage:
    counts = usage(len(sampling.prompt), sent)
    counts.cached_tokens = sampling.cached_tokens
    return counts


def _item(request: PreprocessedRequest, sampling: RequestSampling, output: Output, sent: int) -> LLMEngineOutput:
    """Return what is new in an output; the last one with its reason. A hidden stop token is left out."""
    tokens = list(output.tokens[sent:])
    item = LLMEngineOutput(tokens)
    end = sent + len(tokens)
    if output.finished:
        item.finish_reason = FinishReason.LENGTH
        last = output.tokens[-1] if output.tokens else None
        if last in sampling.stop_ids:
            visible = last in (request.stop_conditions.stop_token_ids or ())
            item.finish_reason = FinishReason.STOP if visible else FinishReason.EOS
            if visible:
                item.stop_reason = last
            elif tokens:
                tokens.pop()
                end -= 1
            item.token_ids = tokens
    if sampling.logprobs is not None:
        item.log_probs = sampling.log_probs[sent:end]
        item.top_logprobs = sampling.top_logprobs[sent:end]
    return item


def _failure(error: str, runner: ModelRunner) -> BackendError:
    if not runner.running:
        return BackendError.EngineShutdown(f"the library's batching thread has ended: {error}")
    return BackendError.Unknown(f"the library failed on the request: {error}")
