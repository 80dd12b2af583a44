"""The sections of the pages for authors: kinds of plugins, their contracts, hooks, services and events."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from dynamo_core.contracts.extension import ExtensionServices
from dynamo_core.contracts.plugin import KINDS, Plugin
from dynamo_core.contracts.requests import request_events
from dynamo_core.hookspecs import lifecycle, register
from dynamo_core.plugins.loader import CONTRACTS, REASONING_PARSER
from dynamo_core.protocol import RequestRecord

from scripts.pages.tables import code, described, field_rows, table

#: The keys of the config file that pick a plugin, by kind.
PICKED_BY = {
    "engine": "workers.<name>.engine.use",
    "transport": "transport.use`, `events.use",
    "discovery": "discovery.use",
    "router": "router.use",
    "admission": "admission.use",
    "frontend": "frontend.use",
    "response_store": "frontend.response_store.use",
    "extension": "extensions",
    "tool_parser": "workers.<name>.model.tool_call_parser",
    "reasoning_parser": "workers.<name>.model.reasoning_parser",
    "hook": "hooks",
}
#: A line of code that is longer is broken before its parameters.
WIDTH = 116


def _kinds() -> str:
    def row(kind: str) -> tuple[str, ...]:
        if kind not in CONTRACTS:
            return code(kind), "none", code(PICKED_BY[kind]), "nothing", "at least one hook that announces"
        contract = CONTRACTS[kind]
        abstract = vars(contract.load()).get("__abstractmethods__", frozenset())
        required = [name for name in vars_of(contract.load()) if name in abstract]
        methods = ", ".join(map(code, required)) or "none"
        return code(kind), code(contract.class_name), code(PICKED_BY[kind]), code(contract.hook), methods

    return table(("Kind", "Class", "Picked by", "Offered by", "Required methods"), map(row, KINDS))


def vars_of(cls: type) -> list[str]:
    """Return the names that a contract and its bases define, in the order of their definition."""
    return list(dict.fromkeys(name for base in bases_of(cls) for name in vars(base)))


def bases_of(cls: type) -> list[type]:
    """Return the classes that a contract is made of, those that others extend first, without `Plugin`."""
    contracts = "dynamo_core.contracts."
    return [base for base in reversed(cls.__mro__) if base.__module__.startswith(contracts) and base is not Plugin]


def _contract(kind: str) -> str:
    cls = CONTRACTS[kind].load()
    nodes: dict[str, str] = {}
    for base in bases_of(cls):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        nodes |= dict(_members(vars(tree.body[0])["body"]))
    fields = [text for text in nodes.values() if "def " not in text]
    methods = [text for text in nodes.values() if "def " in text]
    # The constructor is first, however far the base is away that has it.
    methods.sort(key=lambda text: "def __init__" not in text)
    body = "\n".join([*fields, *([""] if fields else []), *methods])
    shown = f"```python\nclass {cls.__name__}:\n{textwrap.indent(body, '    ', lambda line: line != chr(10))}\n```\n"
    return f"{shown}\n{_members_of(kind)}"


def _members(body: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            # `waits_for` is set by `wait_for`, which plugins call and do not write.
            if node.target.id != "waits_for":
                yield node.target.id, ast.unparse(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            node.name == "__init__" or not (node.name.startswith("_") or node.name == "wait_for")
        ):
            yield node.name, _signature(node)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = "".join(f"@{ast.unparse(one)}\n" for one in node.decorator_list)
    start = f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}def {node.name}("
    end = f") -> {ast.unparse(node.returns) if node.returns else None}: ..."
    arguments = re.sub(r"(?<=[\w\]])=(?=\S)", " = ", ast.unparse(node.args))
    line = f"{start}{arguments}{end}"
    return decorators + (line if len(line) <= WIDTH else f"{start}\n    {arguments}\n{end}")


def _members_of(kind: str) -> str:
    cls = CONTRACTS[kind].load()
    rows: dict[str, tuple[str, str]] = {}
    # The page has the members that parsers share once.
    for base in bases_of(cls) if kind != REASONING_PARSER else [cls]:
        rows |= {names: (names, text) for names, text in field_rows(base) if "waits_for" not in names}
        rows |= dict(_methods(base))
    return table(("Member", "Meaning"), rows.values())


def _methods(cls: type) -> Iterator[tuple[str, tuple[str, str]]]:
    for name, member in vars(cls).items():
        method = getattr(member, "__func__", member)
        if name.startswith("_") or not (inspect.isfunction(method) or isinstance(method, property)):
            continue
        parameters = [*inspect.signature(method).parameters][1:] if inspect.isfunction(method) else []
        shown = code(f"{name}({', '.join(parameters)})" if inspect.isfunction(method) else name)
        yield name, (shown, described(method))


def _hooks() -> str:
    rows = []
    for area in (register, lifecycle):
        for name, hook in vars(area).items():
            if name.startswith("dynamo_"):
                parameters = ", ".join(map(code, inspect.signature(hook).parameters)) or "none"
                text = described(hook)
                rows.append((code(name), parameters, text.partition("; ")[0].rstrip(".") + "."))
    return table(("Hook", "Parameters", "Called"), rows)


def _services() -> str:
    return table(("`self.services`", "Meaning"), field_rows(ExtensionServices))


def _events() -> str:
    def row(cls: type) -> tuple[str, str, str]:
        known = request_events.RequestEvent.__struct_fields__
        fields = [name for name in cls.__struct_fields__ if name not in known]  # type: ignore[attr-defined] # a Struct
        tag = cls.__struct_config__.tag  # type: ignore[attr-defined] # a Struct
        return f"{code(cls.__name__)} ({code(tag)})", ", ".join(map(code, fields)), described(cls)

    return table(("Event", "Fields", "Meaning"), map(row, request_events.RequestEvent.__subclasses__()))


def _record() -> str:
    return table(("Field of `RequestRecord`", "Meaning"), field_rows(RequestRecord))


SECTIONS: dict[str, Callable[[], str]] = {
    "kinds": _kinds,
    **{f"contract-{kind}": partial(_contract, kind) for kind in CONTRACTS},
    "hooks": _hooks,
    "services": _services,
    "events": _events,
    "record": _record,
}
