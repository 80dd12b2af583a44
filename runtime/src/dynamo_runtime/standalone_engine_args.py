"""The command line of an engine that runs alone: flags that all engines share, and one per field of its settings."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.engine import DisaggregationMode, LLMEngine, RuntimeOptions, WorkerConfig
from dynamo_core.errors import ConfigError
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dynamo_runtime.assembly.worker_process import worker_config
from dynamo_runtime.settings import FLAGS, LoadedSettings, Settings
from dynamo_runtime.settings.known_keys import REQUIRED, shape_of
from dynamo_runtime.settings.sources import option_layer
from dynamo_runtime.settings.tree import Table
from dynamo_runtime.standalone_engine_settings import PLANES, load_standalone, worker_word

EngineT = TypeVar("EngineT", bound=LLMEngine)

#: The flags of the one table that mean something to a worker alone, in the order of the help.
COMMON = (
    "--model-name",
    "--model-path",
    "--custom-jinja-template",
    "--namespace",
    "--component",
    "--endpoint",
    "--endpoint-types",
    "--disaggregation-mode",
    "--migration-limit",
    "--engine-request-limit",
    "--request-plane",
    "--discovery-backend",
    "--event-plane",
    "--system-port",
    "--log-level",
)
_MODE = "--disaggregation-mode"
_FILE = ("--config", "--profile", "--set", "--worker")
#: Flags that no engine can take for itself.
TAKEN = frozenset((*COMMON, *_FILE, "--help"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonArgs:
    """The values of the common flags. Absent ones are left to the environment and the config file."""

    #: Which worker of the config file this is; None: the one that is called as the engine.
    worker: str | None = None
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)

    @staticmethod
    def add_to(parser: argparse.ArgumentParser) -> None:
        """Add the flags to a parser, whatever else that has."""
        group = parser.add_argument_group(
            "common options", "The same for every engine. A flag wins over its variable, and both over the config file."
        )
        known = {flag.flag: flag for flag in FLAGS}
        for name in COMMON:
            flag = known[name]
            hint = f" [env: {flag.env}]" if flag.env else ""
            group.add_argument(
                name,
                dest=_dest(name),
                metavar="N" if flag.type is int else "TEXT",
                help=_escaped(f"{flag.help}{hint}{_default_of(flag.path)}"),
            )
        group.add_argument("--config", metavar="FILE", help="The config file, YAML or TOML. [env: DYN_CONFIG]")
        group.add_argument("--profile", metavar="NAME", help="A profile of the config file. [env: DYN_PROFILE]")
        group.add_argument(
            "--set",
            dest="sets",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="Set one key of the configuration; may be given more than once.",
        )
        group.add_argument(
            "--worker", metavar="NAME", help="Which worker of the config file this is (default: the engine's name)."
        )

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> CommonArgs:
        """Return what a parser with these flags has read.

        Raises:
            BackendError.InvalidArgument: there is no such disaggregation mode.
        """
        given = {name: getattr(parsed, _dest(name)) for name in COMMON}
        if given[_MODE] is not None:
            given[_MODE] = DisaggregationMode.parse(given[_MODE]).value
        runtime = RuntimeOptions(
            config_file=parsed.config,
            profile=parsed.profile,
            overrides=tuple(parsed.sets),
            flags={name: value for name, value in given.items() if value is not None},
        )
        return cls(worker=parsed.worker, runtime=runtime)

    def worker_config(
        self, engine: str, *, model_name: str | None = None, env: Mapping[str, str] | None = None
    ) -> WorkerConfig:
        """Return the worker that an engine of this name runs in. `model_name` is for when nothing says it.

        Raises:
            ConfigError: a flag, a variable or the config file is wrong.
        """
        return self.worker_of(self.load(engine, model_name=model_name, env=env), engine)

    def load(
        self,
        engine: str,
        *,
        model_name: str | None = None,
        env: Mapping[str, str] | None = None,
        above: Table | None = None,
    ) -> LoadedSettings:
        """Return all settings, with those of the worker under its name; see `worker_config`."""
        return load_standalone(
            self.name_for(engine),
            engine=engine,
            model_name=model_name or f"{engine}-model",
            runtime=self.runtime,
            above=above,
            env=env,
        )

    def worker_of(self, loaded: LoadedSettings, engine: str) -> WorkerConfig:
        """Return the worker in settings that `load` gave."""
        name = self.name_for(engine)
        config = worker_config(loaded.settings.namespace, name, loaded.settings.workers[name], 0)
        return replace(config, runtime=self.runtime)

    def name_for(self, engine: str) -> str:
        """Return the name of the worker in the settings."""
        return self.worker or worker_word(engine)


def from_args(
    engine_class: type[EngineT], argv: Sequence[str] | None = None, *, env: Mapping[str, str] | None = None
) -> tuple[EngineT, WorkerConfig]:
    """Return the engine and its worker as a command line describes them; None means that of this process.

    The flags are those of `CommonArgs`, and one for every field of `Config`. The keys of the engine have the precedence
    of all settings: flags, ``--set``, the environment, the config file.

    Raises:
        ConfigError: a flag, a variable or the config file is wrong.
        BackendError.InvalidArgument: there is no such disaggregation mode.
        SystemExit: help was asked for, or a flag is not known.
    """
    name = engine_class.NAME or worker_word(engine_class.__name__)
    parser = parser_for(engine_class)
    parsed = parser.parse_args(argv)
    common = CommonArgs.of(parsed)
    section = f"workers.{common.name_for(name)}.engine"
    given = {
        option.flag: (f"{section}.{option.key}", getattr(parsed, option.dest))
        for option in _options_of(engine_class.Config)
    }
    loaded = common.load(
        name, env=env, above=option_layer({flag: value for flag, value in given.items() if value[1] is not None})
    )
    _check_use(loaded, section, name)
    config = common.worker_of(loaded, name)
    return engine_class(loaded.plugin_config(section, engine_class.Config), config), config


def parser_for(engine_class: type[LLMEngine]) -> argparse.ArgumentParser:
    """Return the command line of an engine: the common flags, and one for every field of its settings."""
    parser = argparse.ArgumentParser(
        prog=_program(engine_class),
        usage="%(prog)s [options]",
        description=_escaped((inspect.getdoc(engine_class) or "").partition("\n")[0]),
        allow_abbrev=False,
    )
    CommonArgs.add_to(parser)
    options = list(_options_of(engine_class.Config))
    if options:
        group = parser.add_argument_group(
            "options of this engine", "Also keys of its section in the config file. Lists and mappings are YAML."
        )
        for option in options:
            option.add_to(group)
    return parser


class _Option(NamedTuple):
    """A flag for one field of an engine's settings."""

    flag: str
    key: str
    info: FieldInfo

    @property
    def dest(self) -> str:
        return f"engine_{self.key}"

    def add_to(self, group: Any) -> None:
        """Add it to a group of a parser. The value is checked later, with that of all other layers."""
        text = _escaped(f"{self.info.description or ''}{_shown(self.info)}".strip())
        if self.info.annotation is bool:
            group.add_argument(self.flag, dest=self.dest, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(self.flag, dest=self.dest, metavar=_metavar(self.info.annotation), help=text)


def _options_of(config: type[PluginConfig]) -> Iterator[_Option]:
    for name, info in config.model_fields.items():
        key = info.alias or name
        flag = f"--{key.replace('_', '-')}"
        yield _Option(f"--engine-{flag[2:]}" if flag in TAKEN else flag, key, info)


def _check_use(loaded: LoadedSettings, section: str, engine: str) -> None:
    name = section.split(".")[1]
    use = loaded.settings.workers[name].engine.use
    if use != engine:
        raise ConfigError(
            f"{loaded.origin(f'{section}.use')}: {section}.use: is {use!r}, but the engine that runs is {engine!r}: "
            "pick another worker of the config file with --worker"
        )


def _program(engine_class: type[LLMEngine]) -> str | None:
    """Return how the engine was called, if that was ``python -m`` with its package; else it is left to argparse."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    package = getattr(spec, "parent", "")
    return f"python -m {package}" if package and engine_class.__module__.startswith(package) else None


def _dest(flag: str) -> str:
    return flag[2:].replace("-", "_")


def _escaped(text: str) -> str:
    """Return text as argparse takes it: it fills in what follows a percent sign."""
    return text.replace("%", "%%")


def _default_of(path: Sequence[str]) -> str:
    shape = shape_of(Settings).at(path)
    default = PLANES.get(path[0]) if path[-1] == "use" else shape.default if shape is not None else None
    return "" if default is None or default is REQUIRED else _default(default)


def _shown(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return " (required)"
    return "" if default is None or isinstance(default, SecretStr) else _default(default)


def _default(value: object) -> str:
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f" (default: {value})" if value != "" else ""


def _metavar(annotation: object) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    for kind, word in ((int, "N"), (float, "X"), (str, "TEXT")):
        if annotation is kind or kind in get_args(annotation):
            return word
    return "VALUE"
