"""The sections of docs/reference/engine-contract.md: methods, contexts, fields, flags, and the kit."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from dynamo_core import EngineConfig, EngineContext, GenerateContext, WorkerConfig
from dynamo_core.contracts import engine as contract
from dynamo_core.contracts.engine import RuntimeOptions
from dynamo_core.protocol import output, request
from dynamo_runtime.standalone_engine_args import CommonArgs
from dynamo_testing.engine.checks import CHECKS
from dynamo_testing.engine_kit import EngineConformance

from scripts.pages.tables import code, comments, described, field_rows, table

#: The groups of options and counts, in the order of the page.
GROUPS: tuple[Any, ...] = (
    request.StopConditions,
    request.SamplingOptions,
    request.GuidedDecodingOptions,
    request.OutputOptions,
    request.RoutingHints,
    request.RouterConfigOverride,
    request.PrefillResult,
    request.BootstrapInfo,
    request.TraceLink,
    output.CompletionUsage,
    output.TopLogprob,
)


def _contexts() -> str:
    def row(name: str, member: object) -> tuple[str, str, str]:
        plain = getattr(EngineContext, name, None)
        shown = f"{name}({', '.join([*inspect.signature(member).parameters][1:])})" if callable(member) else name
        of = "both" if hasattr(EngineContext("r"), name) else "`GenerateContext`"
        return code(shown), described(plain if inspect.isfunction(plain) else member), of

    members = vars(GenerateContext).items()
    shown = (row(name, member) for name, member in members if not name.startswith("_") and described(member))
    return table(("Member", "Meaning", "Of"), shown)


def _capabilities() -> str:
    source = inspect.getsource(contract)
    found = re.findall(r"^((?:#: .*\n)+)([A-Z_]+) = \"(?!auto|none)\w+\"$", source, re.MULTILINE)
    meanings = ((code(name), " ".join(comment.replace("#:", "").split())) for comment, name in found)
    return table(("Capability", "Meaning"), meanings)


def _defaults(cls: Any) -> str:
    if dataclasses.is_dataclass(cls):
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    else:
        defaults = vars(cls)
    rows = []
    for names, text in comments(cls):
        shown = dict.fromkeys(_default(defaults[name]) for name in names)
        rows.append((", ".join(map(code, names)), ", ".join(shown), text))
    return table(("Field", "Default", "Meaning"), rows)


def _default(value: object) -> str:
    if value is dataclasses.MISSING or value == frozenset():
        return "–"
    if isinstance(value, tuple):
        return ", ".join(map(code, value)) or "–"
    if isinstance(value, float):
        return code(f"{value:g}")
    return code(value if isinstance(value, str) and value else repr(value))


def _struct(cls: type) -> str:
    return table(("Field", "Meaning"), field_rows(cls))


def _groups() -> str:
    return table(
        ("Group", "Fields", "Meaning"),
        ((code(cls.__name__), ", ".join(map(code, cls.__struct_fields__)), described(cls)) for cls in GROUPS),
    )


def _flags() -> str:
    parser = argparse.ArgumentParser(add_help=False)
    CommonArgs.add_to(parser)
    rows = []
    for action in parser._actions:
        text = (action.help or "").replace("%%", "%")
        variable = re.search(r" ?\[env: (\w+)\]", text)
        text = text.replace(variable[0], "") if variable else text
        rows.append((code(action.option_strings[0]), code(variable[1]) if variable else "–", text))
    return table(("Flag", "Variable", "Meaning"), rows)


def _checks() -> str:
    return table(("Check", "Promise"), ((code(check.name), check.promise) for check in CHECKS))


def _failures() -> str:
    rows = []
    for failure in dict.fromkeys(failure for check in CHECKS for failure in check.failures):
        found_by = ", ".join(code(check.name) for check in CHECKS if failure in check.failures)
        remedy = failure.REMEDY[0].upper() + failure.REMEDY[1:]
        rows.append((found_by, code(failure.__name__), (failure.__doc__ or "").partition("\n")[0], remedy))
    return table(("Check", "Failure", "Meaning", "Remedy"), rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "contexts": _contexts,
    "worker-config": partial(_defaults, WorkerConfig),
    "runtime-options": partial(_defaults, RuntimeOptions),
    "engine-config": partial(_defaults, EngineConfig),
    "capabilities": _capabilities,
    "request": partial(_struct, request.PreprocessedRequest),
    "request-groups": _groups,
    "output": partial(_struct, output.LLMEngineOutput),
    "engine-flags": _flags,
    "conformance-attributes": partial(_defaults, EngineConformance),
    "conformance-checks": _checks,
    "conformance-failures": _failures,
}
