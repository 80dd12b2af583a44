"""What our stack costs over transformers alone: tokens per second, times and CPU, of one model in one run.

Four targets take turns: the library's continuous batching in this process, asked as a program around it would; the
engine plugin in this process; `dynamo serve` as one process, over HTTP; and as several, over `tcp`. Without `--model`
it makes a Llama with random weights. It needs an environment with the library: `make test-transformers` sets one up for
a CPU. A small model on a CPU shows the cost at its worst: its tokens cost next to nothing, and all processes share the
cores.
"""

import argparse
import asyncio
import itertools
import platform
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from dynamo_core import WorkerConfig
from dynamo_plugin_engine_transformers.config import TransformersConfig
from dynamo_plugin_engine_transformers.engine import TransformersEngine
from dynamo_plugin_engine_transformers.model_runner import load_libraries
from dynamo_testing.tiny_model import make_tokenizer_folder, save_llama

from benchmarks.children import Children
from benchmarks.loops import run_until_sigterm
from benchmarks.overhead import (
    MODEL,
    READY,
    Results,
    add_load,
    in_process,
    longest,
    measure,
    of_engine,
    publish,
    served,
)

#: Models that can be made, in the shapes of well-known ones: their sizes, and how large random weights are.
SIZES: Final[Mapping[str, Mapping[str, object]]] = {
    "tiny": {},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "initializer_range": 0.05,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "initializer_range": 0.05,
    },
}
VOCABULARY: Final = 4000
CONTEXT: Final = 8192


class Library:
    """The library's manager of batches, with the sizes of the engine and everything else as the library chooses it."""

    def __init__(self, folder: Path, settings: TransformersConfig, device: str) -> None:
        self._folder = folder
        self._settings = settings
        self._device = device
        self._keys = itertools.count()
        self._manager: Any = None

    async def __aenter__(self) -> "Library":
        await asyncio.to_thread(self._start)
        async with asyncio.timeout(READY):
            while self._manager.batch_processor is None:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._manager.stop, block=True, timeout=20.0, hard_stop=True)

    def _start(self) -> None:
        torch, transformers = load_libraries()
        settings = self._settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=_dtype(torch, settings), attn_implementation=settings.attention, local_files_only=True
        ).to(self._device)
        assert settings.kv_cache_tokens is not None
        self._manager = model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=settings.block_size,
                num_blocks=-(-settings.kv_cache_tokens // settings.block_size),
                max_batch_tokens=settings.max_num_batched_tokens,
                max_requests_per_batch=settings.max_num_seqs,
                allow_block_sharing=settings.enable_prefix_caching,
                auto_switch_to_flash=False,
            ),
        )
        self._manager.start()

    async def stream(self, prompt: list[int], limit: int) -> AsyncIterator[Sequence[int]]:
        """Yield the tokens of one answer, as they come."""
        key = f"alone-{next(self._keys)}"
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._manager.register_result_handler(key, outputs.put_nowait)
        self._manager.add_request(prompt, request_id=key, max_new_tokens=limit, streaming=True, eos_token_id=-1)
        sent = 0
        while sent < limit:
            output = await outputs.get()
            if output.error is not None:
                raise RuntimeError(output.error)
            yield output.generated_tokens[sent:]
            sent = len(output.generated_tokens)


def _dtype(torch: Any, settings: TransformersConfig) -> Any:
    return "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks transformers`."""
    parser.add_argument("--model", type=Path, help="a model folder (default: one is made)")
    parser.add_argument("--make", choices=tuple(SIZES), default="tiny", help="the model to make (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--attention", default="sdpa", help="default %(default)s")
    parser.add_argument("--threads", type=int, help="CPU threads of one step")
    parser.add_argument("--batched-tokens", type=int, default=2048, help="tokens of one step (default %(default)s)")
    add_load(parser, streams="1,16,64", prompt=500, tokens=128, rounds=3)


def run_transformers(options: argparse.Namespace) -> int:
    """Print a table per level; the exit code is 0, or 143 when ended by SIGTERM."""
    return run_until_sigterm(_run(options))


async def _run(options: argparse.Namespace) -> int:
    torch, transformers = load_libraries()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as folder:
        model = options.model.resolve() if options.model else _make(Path(folder), options.make, device)
        results = await _compare(options, Path(folder), model, device)
    about = {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "model": options.model or options.make,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attention": options.attention,
        "python": platform.python_version(),
    }
    publish(results, options, about)
    return 0


def _make(folder: Path, size: str, device: str) -> Path:
    model = make_tokenizer_folder(folder / "model", vocab_size=VOCABULARY)
    dtype = "float32" if device == "cpu" else "bfloat16"
    save_llama(model, vocab_size=VOCABULARY, device=device, dtype=dtype, max_position_embeddings=CONTEXT, **SIZES[size])
    return model


async def _compare(options: argparse.Namespace, folder: Path, model: Path, device: str) -> Results:
    settings = {
        "device": device,
        "attention": options.attention,
        "threads": options.threads,
        "max_num_seqs": max(options.streams),
        "max_num_batched_tokens": options.batched_tokens,
        # For all streams of a level at once, and some to spare.
        "kv_cache_tokens": max(4096, max(options.streams) * longest(options) * 5 // 4),
    }
    config = TransformersConfig.model_validate(settings)
    engine = TransformersEngine(config, WorkerConfig(model_name=MODEL, model_path=str(model)))
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder, None))
        worker = {"use": "transformers", **settings}
        # To load a model takes long, and each process waits for itself.
        async with asyncio.TaskGroup() as group:
            servers = [
                group.create_task(served(children, folder, worker, model, processes=processes))
                for processes in (False, True)
            ]
            library = await stack.enter_async_context(Library(model, config, device))
            stack.push_async_callback(engine.cleanup)
            await engine.start(1)
        targets = [
            in_process("library alone", library.stream),
            of_engine(engine),
            *(server.result() for server in servers),
        ]
        return await measure(targets, options)
