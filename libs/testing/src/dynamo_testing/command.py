"""``dynamo conformance``: holds an installed plugin to its contract."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import click
from dynamo_core.errors import ConfigError
from dynamo_runtime.cli.lazy import KindGroup
from dynamo_runtime.cli.options import json_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_core.contracts.config import PluginConfig
    from dynamo_core.contracts.engine import DisaggregationMode, LLMEngine
    from dynamo_core.contracts.plugin import Plugin
    from dynamo_core.plugins.metadata import PluginEntry

    from dynamo_testing.engine.bench import Prefill
    from dynamo_testing.engine.checks import Check
    from dynamo_testing.engine.report import CheckResult, Report

#: Switches on the checks of every stream that an engine yields, for engines that have others within them.
VALIDATOR = "DYN_STREAM_VALIDATOR"
#: Seconds between two beats of the event loop; well below the watchdog's slack.
BEAT = 0.5
#: Seconds for what the engine has left running to end, before the process ends without it; and the watchdog's slack.
FAREWELL = 5.0

SECONDS = click.FloatRange(min=0, min_open=True)


@click.group(cls=KindGroup, part="kit")
def command() -> None:
    """Hold a plugin to its contract, with the kit of its kind.

    NAME is what `use:` says in a config file, or a plugin of one file: ./sticky.py:StickyRouter.
    """


@command.command("engine")
@click.argument("name")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set one key of the engine; repeatable.")
@click.option("--model-name", metavar="NAME", help="What the model is called; the engine's name by default.")
@click.option("--model-path", metavar="FOLDER", help="A model folder in the Hugging Face layout.")
@click.option(
    "--mode", metavar="ROLE", default="agg", show_default=True, help="The role of the worker: agg, prefill or decode."
)
@click.option(
    "--prefill-result",
    metavar="JSON",
    help="With --mode decode: what each request is given, such as '{\"disaggregated_params\": {}}'.",
)
@click.option(
    "--with-prefill",
    is_flag=True,
    help="With --mode decode: run a prefill engine of the same settings beside it, and give each request its result.",
)
@click.option("--token-ids", metavar="IDS", default="1,2,3", show_default=True, help="The prompt, divided by commas.")
@click.option("--start-timeout", type=SECONDS, default=120.0, show_default=True, help="Seconds for the start.")
@click.option("--request-timeout", type=SECONDS, default=60.0, show_default=True, help="Seconds for one request.")
@json_option
@click.pass_context
def engine(ctx: click.Context, /, name: str, as_json: bool, **options: Any) -> None:
    """Run an engine through every promise of the engine contract.

    NAME is what `use:` says in a config file. Print one line per check. Exit code 0: the engine keeps its contract; 1:
    it does not, and the last lines say what was seen, what the contract says and what to do; 2: it could not be tried.
    """
    os.environ.setdefault(VALIDATOR, "1")
    ctx.exit(_Trial(name, as_json=as_json, **options).run())


class _Trial:
    """One run of the kit, and its output."""

    def __init__(
        self,
        name: str,
        *,
        as_json: bool,
        sets: Sequence[str],
        model_name: str | None,
        model_path: str | None,
        mode: str,
        prefill_result: str | None,
        with_prefill: bool,
        token_ids: str,
        start_timeout: float,
        request_timeout: float,
    ) -> None:
        from dynamo_core.contracts.engine import DisaggregationMode

        from dynamo_testing.engine.watchdog import Watchdog

        self._as_json = as_json
        self._mode = _mode(mode)
        decodes = self._mode is DisaggregationMode.DECODE
        if (prefill_result is not None or with_prefill) and not decodes:
            raise ConfigError("--prefill-result and --with-prefill are for --mode decode")
        if prefill_result is not None and with_prefill:
            raise ConfigError("--prefill-result and --with-prefill exclude each other")
        self._with_prefill = with_prefill
        self._prefill_result = _prefill_result(prefill_result)
        self._token_ids = _token_ids(token_ids)
        self._start_timeout = start_timeout
        self._request_timeout = request_timeout
        cls, self._config, self._plugin_entry = _load("engine", name, sets)
        self._cls = cast("type[LLMEngine]", cls)
        self._model_name = model_name or name
        self._model_path = _folder(model_path)
        self._watchdog = Watchdog(self._stuck)
        self._check: Check | None = None
        self._results: list[CheckResult] = []

    def run(self) -> int:
        """Return the exit code.

        Raises:
            ConfigError: the engine cannot be made with these settings.
        """
        offer = self._plugin_entry
        self._say(f"engine {offer.name} ({offer.origin}), mode {self._mode.value}")
        self._watchdog.patience = self._start_timeout
        self._watchdog.start()
        try:
            return asyncio.run(self._run())
        finally:
            self._watchdog.stop()

    async def _run(self) -> int:
        from dynamo_core.tasks import TaskSet

        from dynamo_testing.engine.failures import ConformanceFailure

        tasks = TaskSet()
        tasks.spawn(self._beat(), name="heartbeat")
        try:
            report = await self._conform()
        except ConformanceFailure as failure:
            # A wrong setting that only a start can find is no fault of the engine.
            if isinstance(failure.__cause__, ConfigError):
                raise failure.__cause__ from None
            if failure.report is None:
                raise ConfigError(f"the prefill engine beside it: {failure.name}: {failure.seen}") from failure
            report = failure.report
        finally:
            await tasks.aclose()
        code = 0 if report.passed else 1
        self._finish(report)
        # Tasks and threads that the engine has left running must not keep the process.
        self._watchdog.beat()
        self._watchdog.patience = FAREWELL
        self._watchdog.stuck = lambda seen, seconds: _leave(code)
        return code

    async def _conform(self) -> Report:
        from dynamo_core.contracts.engine import DisaggregationMode

        from dynamo_testing.engine.peer import PrefillPeer
        from dynamo_testing.engine.run import run_conformance

        timeouts = {"start_timeout": self._start_timeout, "request_timeout": self._request_timeout}
        async with AsyncExitStack() as stack:
            prefill: Prefill = self._prefill_result
            if self._with_prefill:
                peer = PrefillPeer(lambda: self._make(DisaggregationMode.PREFILL), **timeouts)
                prefill = await stack.enter_async_context(peer)
            return await run_conformance(
                lambda: self._make(self._mode),
                token_ids=self._token_ids,
                prefill_result=prefill,
                on_begin=self._begin,
                on_result=self._result,
                **timeouts,
            )

    def _make(self, mode: DisaggregationMode) -> LLMEngine:
        from dynamo_core.contracts.engine import WorkerConfig
        from dynamo_core.contracts.engine_boundary import make_engine

        worker = WorkerConfig(
            model_name=self._model_name,
            model_path=self._model_path,
            worker="conformance",
            disaggregation_mode=mode,
        )
        return make_engine(self._cls, self._config, worker)

    async def _beat(self) -> None:
        while True:
            self._watchdog.beat()
            await asyncio.sleep(BEAT)

    def _begin(self, check: Check) -> None:
        from dynamo_testing.engine.bench import Plan

        self._check = check
        plan = Plan(start_timeout=self._start_timeout, request_timeout=self._request_timeout)
        self._watchdog.patience = check.patience(plan)

    def _result(self, result: CheckResult) -> None:
        from dynamo_testing.engine.report import line_of

        self._results.append(result)
        self._say(line_of(result))

    def _finish(self, report: Report) -> None:
        if self._as_json:
            offer = self._plugin_entry
            about = {"name": offer.name, "distribution": offer.distribution, "version": offer.version}
            click.echo(json.dumps(about | report.as_dict(), indent=2))
        else:
            click.echo(report.summary())

    def _stuck(self, seen: str, seconds: float) -> None:
        """End the process, since the loop will not come back; called in the watchdog's thread."""
        from dynamo_testing.engine.report import Report
        from dynamo_testing.engine.run import blocked

        if self._check is None:
            click.echo(f"dynamo: the prefill engine beside it: {seen}", err=True)
            _leave(2)
        else:
            self._result(blocked(self._check, seen, seconds))
            self._finish(Report(self._cls.__name__, self._mode.value, checks=self._results))
            _leave(1)

    def _say(self, text: str) -> None:
        if not self._as_json:
            click.echo(text)


def _leave(code: int) -> None:
    """End the process, whatever still runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _load(kind: str, name: str, sets: Sequence[str]) -> tuple[type[Plugin], PluginConfig, PluginEntry]:
    """Return the class of a plugin with its settings, and where it comes from.

    Raises:
        ConfigError: it cannot be loaded, or a setting is wrong.
    """
    from dataclasses import replace

    from dynamo_core.plugin_files import PluginFiles, names_in
    from dynamo_core.plugins.loader import PluginLoader
    from dynamo_runtime.settings.known_keys import shape_of
    from dynamo_runtime.settings.secrets_in_settings import resolve
    from dynamo_runtime.settings.sources import set_layer
    from dynamo_runtime.settings.validation import ValidationSubject, validate

    # The command line names the file, and is the operator's own.
    loader = PluginLoader(PluginFiles(names_in(name)))
    cls = loader.load(kind, name)
    # As in the plugin's section of a config file: what is not known is told by the plugin's own settings.
    shape = replace(shape_of(cls.Config), is_section=True)
    layer = resolve(set_layer(sets, shape), os.environ)
    subject = ValidationSubject(shape, owner=f"{kind.replace('_', ' ')} {name!r}", origin="--set")
    config, _ = validate(cls.Config.model_validate, layer, subject)
    return cls, config, loader.find(kind, name)


def _mode(text: str) -> DisaggregationMode:
    from dynamo_core.contracts.engine import DisaggregationMode

    try:
        return DisaggregationMode(text)
    except ValueError:
        known = ", ".join(mode.value for mode in DisaggregationMode)
        raise ConfigError(f"--mode: there is no role {text!r}: it is one of {known}") from None


def _folder(path: str | None) -> str | None:
    from dynamo_core.contracts.model_folder import load_folder

    if path is not None:
        load_folder(path)
    return path


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--token-ids: expected numbers divided by commas, such as 1,2,3, got {text!r}") from None


def _prefill_result(text: str | None) -> Prefill:
    import msgspec
    from dynamo_core.protocol.decoding import Unreadable, read
    from dynamo_core.protocol.request import PrefillResult

    from dynamo_testing.engine.bench import NOTHING_PREFILLED

    if text is None:
        return NOTHING_PREFILLED
    try:
        result = read(msgspec.json.Decoder(PrefillResult), text)
    except Unreadable as error:
        raise ConfigError(f"--prefill-result: is not what a decode engine is given: {error}") from None
    fields: dict[str, Any] = msgspec.to_builtins(result)
    return fields


#: The kinds whose kits are classes of tests, by the word of the command.
_KITS = {
    "router": "the candidates, accounting and cost of a router",
    "admission": "letting in, refusing and giving back",
    "transport": "calls, streams and events; a broker has to run, whose address --set gives",
    "discovery": "leases, records and watches; a store has to run, whose address --set gives",
    "frontend": "routes, tokenizers and, with --request, what becomes of a request",
    "response_store": "owners, lives and writers; a server has to run, or a file be named, with --set",
    "extension": "routes, events of requests, secrets, and what is left of one that was closed",
    "parser": "what comes out of a text, however it is cut; with --reasoning a reasoning parser",
}


def _attributes(given: Sequence[str]) -> dict[str, Any]:
    """Return attributes of a kit, as the command line has them."""
    from dynamo_runtime.settings.documents import parse_text
    from dynamo_runtime.settings.tree import to_plain

    attributes = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isupper():
            raise ConfigError(f"--kit {text}: expected ATTRIBUTE=VALUE, such as --kit CAN_PIN=true")
        attributes[name] = to_plain(parse_text(value, ""))
    return attributes


def _add_command(word: str, about: str) -> None:
    def check(name: str, sets: tuple[str, ...], as_json: bool, start_timeout: float, **more: Any) -> None:
        from dynamo_testing.installed.kit_run import Trial
        from dynamo_testing.installed.subject import Subject

        kind = word
        if word == "parser":
            kind = "reasoning_parser" if more.pop("reasoning") else "tool_parser"
        cls, config, entry = _load(kind, name, sets)
        subject = Subject(entry, cls, config, attributes=_attributes(more.pop("attributes")), **more)
        trial = Trial(subject, as_json=as_json, start_timeout=start_timeout)
        click.get_current_context().exit(trial.run())

    parameters: list[click.Parameter] = [
        click.Argument(["name"]),
        click.Option(
            ["--set", "sets"], multiple=True, metavar="KEY=VALUE", help="Set one key of the plugin; repeatable."
        ),
        click.Option(
            ["--kit", "attributes"],
            multiple=True,
            metavar="ATTRIBUTE=VALUE",
            help="Tell the kit what its harness can do, such as CAN_PIN=true; repeatable.",
        ),
        click.Option(
            ["--start-timeout"], type=SECONDS, default=10.0, show_default=True, help="Seconds for the first start."
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON instead of text."),
    ]
    if word == "parser":
        parameters.append(click.Option(["--reasoning"], is_flag=True, help="It is a parser of reasoning."))
    if word == "frontend":
        for option, what in (("--request", "a request"), ("--streaming-request", "a request for a stream")):
            parameters.append(
                click.Option(
                    [option],
                    default="",
                    metavar="TEXT",
                    help=f'The words of {what}: \'POST /path {{"model": "MODEL", "prompt": "PROMPT"}}\'.',
                )
            )
    command.add_command(
        click.Command(
            word,
            callback=check,
            params=parameters,
            short_help=f"Hold {'an' if word[0] in 'aeiou' else 'a'} {word} to its contract.",
            help=f"""Run a plugin of this kind through the promises of its contract: {about}.

NAME is what `use:` says in a config file, or a plugin of one file: ./mine.py:Mine. Prints one line per check. Exit code
0: the plugin keeps its contract; 1: it does not, and the lines say what was seen; 2: it could not be tried. Checks that
need more than the plugin are skipped, and say what they need.
""",
        )
    )


for _word, _about in _KITS.items():
    _add_command(_word, _about)
