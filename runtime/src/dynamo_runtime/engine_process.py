"""`run`: serve one engine in a process of its own."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any, NoReturn, Protocol, cast

from dynamo_core.contracts.duck_typed_engine import EngineLike, as_engine
from dynamo_core.contracts.engine import LLMEngine, WorkerConfig
from dynamo_core.contracts.engine_boundary import location, type_name
from dynamo_core.errors import ConfigError, DynamoError, InvalidArgument

from dynamo_runtime.app import FAILED, serve
from dynamo_runtime.assembly.process_roles import HostedEngine
from dynamo_runtime.assembly.worker_process import COMMON_LABELS
from dynamo_runtime.processes.supervisor import MISCONFIGURED
from dynamo_runtime.standalone_engine_args import from_args
from dynamo_runtime.standalone_engine_settings import layer_of, load_standalone, worker_word

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class HasFromArgs(Protocol):
    """A class of engines with a command line of its own."""

    def from_args(self, argv: Sequence[str] | None = None) -> Any:
        """Return an engine and its worker config, or something to await for them."""


def run(
    engine: EngineLike,
    worker_config: WorkerConfig,
    *,
    config_file: str | PathLike[str] | None = None,
    overrides: Sequence[str] = (),
) -> NoReturn:
    """Serve an engine until SIGTERM or SIGINT, as ``dynamo worker`` does one of a config file, and end the process.

    The engine is any object with the methods of `LLMEngine`; it need not be a plugin. What surrounds it comes from the
    config file, the environment and `worker_config.runtime`; without any of them it is reached over tcp and found in
    the folder that file discovery uses by itself. What `worker_config` says of the worker wins over all of them.

    Args:
        engine: the engine to serve.
        worker_config: the settings of the worker.
        config_file: wins over `worker_config.runtime.config_file`.
        overrides: settings as `--set` takes them; they win over `worker_config.runtime.overrides`.

    Raises:
        SystemExit: always. The code is 0 after an orderly end, 2 if the set-up is wrong (one line on stderr says how),
            1 if the engine or something it needs failed.
    """
    given: object = worker_config
    if not isinstance(given, WorkerConfig):
        sys.exit(
            _refused(ConfigError(f"run(engine, worker_config) was given {type_name(given)}, expected a WorkerConfig"))
        )
    runtime = worker_config.runtime
    runtime = replace(
        runtime,
        config_file=runtime.config_file if config_file is None else fspath(config_file),
        overrides=(*runtime.overrides, *overrides),
    )
    worker = worker_config.worker or worker_word(getattr(engine, "NAME", "") or type(engine).__name__)
    try:
        code = _serve(engine, replace(worker_config, worker=worker, runtime=runtime))
    except ConfigError as error:
        code = _refused(error)
    sys.exit(code)


def engine_main(engine_class: type[LLMEngine] | HasFromArgs, argv: Sequence[str] | None = None) -> NoReturn:
    """Return the whole main of an engine: `from_args`, then `run`. What `from_args` refuses is one line on stderr.

    A class may have a `from_args` of its own, which may be a coroutine and returns an engine and its `WorkerConfig`.

    Raises:
        SystemExit: always, with the codes of `run`.
    """
    try:
        own = getattr(engine_class, "from_args", None)
        made = from_args(cast(type[LLMEngine], engine_class), argv) if own is None else own(argv)
        engine, config = _pair(engine_class, asyncio.run(_awaited(made)) if inspect.isawaitable(made) else made)
    except DynamoError as error:
        sys.exit(_refused(error))
    run(engine, config)


def _pair(engine_class: object, made: Any) -> tuple[EngineLike, WorkerConfig]:
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], WorkerConfig):
        return made
    came = f"({', '.join(map(type_name, made))})" if isinstance(made, tuple) else type_name(made)
    name = getattr(engine_class, "__name__", type(engine_class).__name__)
    method: Any = getattr(engine_class, "from_args", None)
    code = getattr(method, "__code__", None)
    where = "" if code is None else location(code.co_filename, code.co_firstlineno)
    raise ConfigError(f"{name}.from_args returned {came}, expected (engine, WorkerConfig){where}")


def _serve(engine: EngineLike, config: WorkerConfig) -> int:
    _check_labels(config.metrics_labels)
    model_name = config.served_model_name or config.model_name or config.worker
    loaded = load_standalone(
        config.worker,
        engine=config.worker,
        model_name=model_name,
        runtime=config.runtime,
        above=layer_of(config, model_name),
    )
    return serve(loaded, hosted=HostedEngine(as_engine(engine, config), config))


def _check_labels(labels: Mapping[str, str]) -> None:
    for name in labels:
        if not _LABEL.fullmatch(name) or name in COMMON_LABELS:
            why = "every worker has that label" if name in COMMON_LABELS else "that is no name for a label"
            raise ConfigError(f"WorkerConfig.metrics_labels: {name!r}: {why}; choose another")


def _refused(error: DynamoError) -> int:
    """Say in one line what was wrong; the exit code."""
    sys.stderr.write(f"dynamo: {' '.join(str(error).split())}\n")
    return MISCONFIGURED if isinstance(error, ConfigError | InvalidArgument) else FAILED


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
