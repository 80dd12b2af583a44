"""The model runner, the only user of the transformers library: loading, its batching thread, and our sampler."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dynamo_core import BackendError
from dynamo_core.errors import ConfigError

from dynamo_plugin_engine_transformers.config import TransformersConfig
from dynamo_plugin_engine_transformers.request_sampling import RequestSampling
from dynamo_plugin_engine_transformers.sampling import sample

log = logging.getLogger(__name__)

#: The KV cache and the batch on a CPU, unless set.
CPU_CACHE_TOKENS = 32_768
CPU_BATCH_TOKENS = 512
#: Seconds that the batching thread has to end its step and itself.
STOP_TIMEOUT = 20.0
#: Seconds between two checks of a starting thread.
_POLL_INTERVAL = 0.02

_BATCHING = "transformers.generation.continuous_batching"


@dataclass(frozen=True, slots=True)
class Output:
    """The state of a request. `tokens` are all tokens so far; `error` says why it failed."""

    tokens: Sequence[int]
    finished: bool
    error: str | None


#: Called in the event loop's thread.
OutputCallback = Callable[[Output], None]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a running model. Lengths are in tokens."""

    vocabulary: int
    context_length: int
    block_size: int
    blocks: int
    batch_tokens: int


def load_libraries() -> tuple[Any, Any]:
    """Return the modules `torch` and `transformers`.

    Raises:
        ConfigError: they are not installed, or are of a version that this engine does not know.
    """
    # Read when torch is loaded. Its threads would else spin while they wait for each other, and where anything else
    # wants the cores, a frontend for one, a step then takes fifty times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Read at the first attention. On some GPUs torch prefers that of cuDNN, which makes a plan for each size it has not
    # seen, and keeps it. Here the size is that of the whole batch with its cache, so nearly every step has a new one.
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    try:
        torch, transformers = import_module("torch"), import_module("transformers")
        import_module(f"{_BATCHING}.cb_logits_processors")
    except ImportError as error:
        missing = f"{error.name or error}"
        raise ConfigError(
            f"engine 'transformers' needs a library that is not installed ({missing}): "
            "pip install 'dynamo-plugin-engine-transformers[torch]'",
            cause=error,
        ) from error
    return torch, transformers


class ModelRunner:
    """A loaded model and the thread that runs it. `load` and `stop` block; the rest is for the event loop's thread."""

    def __init__(self, settings: TransformersConfig) -> None:
        self._settings = settings
        self._manager: Any = None
        self._router: Any = None
        self._samplings: dict[str, RequestSampling] = {}

    def load(self, folder: str, loop: asyncio.AbstractEventLoop) -> ModelInfo:
        """Load the model and start the thread.

        Raises:
            ConfigError: the libraries are not there, or the folder holds no model that they can serve.
            BackendError.EngineShutdown: there is not enough memory, or the library failed.
        """
        torch, transformers = load_libraries()
        settings = self._settings
        device = _device(torch, settings.device)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        transformers.utils.logging.disable_progress_bar()
        # It has a handler of its own, and tells at length how it is set up.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
        model = self._model(torch, transformers, folder, device)
        sizes = model.config.get_text_config()
        cpu = device == "cpu"
        cache = settings.kv_cache_tokens or (CPU_CACHE_TOKENS if cpu else None)
        try:
            self._manager = manager = model.init_continuous_batching(
                generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
                continuous_batching_config=transformers.ContinuousBatchingConfig(
                    page_size=settings.block_size,
                    num_blocks=None if cache is None else -(-cache // settings.block_size),
                    max_batch_tokens=settings.max_num_batched_tokens or (CPU_BATCH_TOKENS if cpu else None),
                    max_requests_per_batch=settings.max_num_seqs,
                    allow_block_sharing=settings.enable_prefix_caching,
                    auto_switch_to_flash=False,
                    # Our sampler runs on the host between two steps.
                    use_cuda_graph=False,
                    use_async_batching=False,
                ),
            )
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"engine 'transformers' cannot serve the model in {folder}: {error}") from error
        self._install(torch, manager, loop)
        manager.start()
        self._await_cache(manager)
        self._note_matches(manager.batch_processor.cache)
        _let_in_after_cancelling(manager.batch_processor.scheduler)
        limits = manager.continuous_batching_config
        # A request alone must fit into the cache.
        room = max(2, (limits.num_blocks - 1) * settings.block_size)
        lengths = (settings.context_length, getattr(sizes, "max_position_embeddings", None), room)
        return ModelInfo(
            vocabulary=sizes.vocab_size,
            context_length=min(length for length in lengths if length),
            block_size=settings.block_size,
            blocks=limits.num_blocks,
            batch_tokens=limits.max_batch_tokens,
        )

    def submit(self, key: str, sampling: RequestSampling, limit: int, deliver: OutputCallback) -> None:
        """Start a request of at most `limit` tokens. `release` must follow.

        Raises:
            BackendError.EngineShutdown: the thread does not run.
        """
        self._samplings[key] = sampling
        self._router.receivers[key] = deliver
        manager = self._manager
        added = None
        if manager is not None and manager.is_running():
            stops = sorted(sampling.stop_ids) or [-1]
            added = manager.add_request(
                list(sampling.prompt), request_id=key, max_new_tokens=limit, streaming=True, eos_token_id=stops
            )
        if added is None:
            self.release(key, finished=True)
            raise BackendError.EngineShutdown("the engine's batching thread does not run")

    def release(self, key: str, *, finished: bool) -> None:
        """Forget a request; one that has not finished is cancelled."""
        known = self._samplings.pop(key, None)
        if self._router is not None:
            self._router.receivers.pop(key, None)
        if not finished and known is not None and self._manager is not None:
            self._manager.cancel_request(key)

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._manager is not None and bool(self._manager.is_running())

    def stop(self) -> None:
        """End the thread; what still runs fails. Safe twice."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        if manager.is_running():
            manager.stop(block=True, timeout=STOP_TIMEOUT, hard_stop=True)
            if manager.is_running():
                log.error("the batching thread did not end within %s s", STOP_TIMEOUT)
        manager.destroy()

    def _model(self, torch: Any, transformers: Any, folder: str, device: str) -> Any:
        settings = self._settings
        dtype = "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)
        attention = "paged|eager" if settings.attention == "eager" else settings.attention
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=attention, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ConfigError(
                f"engine 'transformers' cannot load {folder}: {_first_line(error)}", cause=error
            ) from error
        try:
            return model.to(device)
        except RuntimeError as error:
            raise BackendError.EngineShutdown(f"the model does not fit on {device}: {_first_line(error)}") from error

    def _install(self, torch: Any, manager: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Put our sampler in the place of the library's, and take its outputs without its queue."""
        processors = import_module(f"{_BATCHING}.cb_logits_processors")
        transformers = import_module("transformers")
        sampler = _sampler_class(torch, processors.ContinuousBatchingLogitsProcessor)(self._samplings)
        manager.logit_processor = processors.ContinuousBatchingLogitsProcessorList(
            transformers.LogitsProcessorList([sampler])
        )
        # One row of numbers per processor is kept for its arguments.
        manager.logit_processor.tensors_required = 1
        api = import_module(f"{_BATCHING}.continuous_api")
        self._router = _router_class(api.OutputRouter)(loop)
        manager.output_router = self._router

    def _await_cache(self, manager: Any) -> None:
        until = time.monotonic() + self._settings.start_timeout
        while manager.batch_processor is None:
            failed = manager.background_thread_status.fatal_error
            if failed is not None or not manager.is_running():
                raise BackendError.EngineShutdown(f"the KV cache could not be made: {_first_line(failed)}")
            if time.monotonic() > until:
                raise BackendError.EngineShutdown(f"no KV cache within {self._settings.start_timeout:g} s")
            time.sleep(_POLL_INTERVAL)

    def _note_matches(self, cache: Any) -> None:
        """Have the library's search for cached prefixes say what it found."""
        search = cache.search_prefix_match

        def noting(request_id: str, prompt_ids: list[int]) -> int:
            found: int = search(request_id, prompt_ids)
            sampling = self._samplings.get(request_id)
            # A request that had to leave the batch is searched for again, and then finds what it wrote itself.
            if sampling is not None and not sampling.produced:
                sampling.cached_tokens = found
            return found

        cache.search_prefix_match = noting


def _let_in_after_cancelling(scheduler: Any) -> None:
    """Let new requests in once cancelled ones have given their blocks back.

    The library keeps them out while its cache is full, and else ends that only when a request finishes: if all that
    ran were cancelled, it would never.
    """
    clear = scheduler.clear_cancelled_requests

    def clearing() -> list[Any]:
        cancelled: list[Any] = clear()
        if cancelled or not scheduler.active_requests:
            scheduler.block_new_requests = False
        return cancelled

    scheduler.clear_cancelled_requests = clearing


def _sampler_class(torch: Any, base: Any) -> Any:
    class Sampler(base):  # type: ignore[misc]
        """Knows which row of a step belongs to which request, and chooses its token."""

        supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - the library's own attribute
        ignored_kwargs: tuple[str, ...] = ()

        def __init__(self, samplings: dict[str, RequestSampling]) -> None:
            self._samplings = samplings
            self._rows: list[RequestSampling] = []

        def fill_defaults(self, int32_tensor: Any) -> None:
            int32_tensor.zero_()

        def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Any:
            # A request that was given up a moment ago still has its row in this step.
            self._rows = [
                self._samplings.get(request.state.request_id) or RequestSampling(prompt=(), temperature=0)
                for request in requests_with_new_token
            ]
            return torch.zeros(len(self._rows), dtype=torch.int32)

        def __call__(self, scores: Any, tensor_arg: Any) -> Any:
            rows = len(self._rows)
            scores[:rows] = sample(torch, scores[:rows], self._rows)
            return scores

    return Sampler


def _router_class(base: Any) -> Any:
    class Router(base):  # type: ignore[misc]
        """Brings outputs from the batching thread to the requests in the event loop, many at once."""

        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            super().__init__()
            self._loop = loop
            self.receivers: dict[str, OutputCallback] = {}

        def deliver(self, output: Any) -> None:
            self.deliver_batch([output])

        def deliver_batch(self, outputs: list[Any]) -> None:
            try:
                self._loop.call_soon_threadsafe(self._dispatch, outputs)
            except RuntimeError:
                # The event loop has ended, and all waiting requests with it.
                log.debug("outputs of requests came after the end of the event loop")

        def _dispatch(self, outputs: list[Any]) -> None:
            for output in outputs:
                receiver = self.receivers.get(output.request_id)
                if receiver is not None:
                    receiver(Output(output.generated_tokens, output.is_finished(), output.error))

    return Router


def _device(torch: Any, wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"engine.device: {wanted} is asked for, and torch sees no such device; set cpu or auto")
    return wanted


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]
