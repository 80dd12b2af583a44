"""The parsers that `auto` may choose from: our distribution's, and those of modules that the config names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import cast

from dynamo_core.contracts.engine import AUTO_PARSER
from dynamo_core.errors import PluginError
from dynamo_core.plugins.loader import PARSER_KINDS, TOOL_PARSER, PluginLoader
from dynamo_core.plugins.metadata import PluginEntry

from dynamo_runtime.assembly.resolve import named_plugins
from dynamo_runtime.settings import Settings
from dynamo_runtime.worker.parser_choice import Candidates, ParserType

log = logging.getLogger(__name__)


def find_candidates(settings: Settings, loader: PluginLoader) -> Candidates:
    """Load them. A worker starts without: a plugin that cannot be loaded is left out, and the log says so."""
    try:
        own = loader.find(TOOL_PARSER, AUTO_PARSER)
    except PluginError as error:
        return Candidates(missing=str(error))
    entries = [own]
    for named in named_plugins(settings):
        # The frontend, which needs it, tells what is wrong with such a plugin.
        if named.kind in PARSER_KINDS:
            with suppress(PluginError):
                entries.append(loader.find(named.kind, named.name))
    tools, reasoning = (tuple(dict.fromkeys(_offered(loader, kind, entries))) for kind in PARSER_KINDS)
    return Candidates(tools, reasoning)


def _offered(loader: PluginLoader, kind: str, entries: Iterable[PluginEntry]) -> Iterator[ParserType]:
    for entry in entries:
        try:
            yield from cast("list[ParserType]", loader.offered(kind, entry))
        except PluginError as error:
            log.info("not among the parsers to choose from: %s", error)
