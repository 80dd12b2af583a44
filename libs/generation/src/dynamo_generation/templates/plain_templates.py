"""Plain chat templates, which use only cheap operations and may be rendered on the event loop.

A template is *plain* if all that it uses takes a time that is linear in the size of its arguments. Its loops, and what
texts and lists grow to, are bounded while it is rendered.
"""

from __future__ import annotations

from jinja2 import Environment, nodes

#: Filters one after the other.
_MAX_CHAIN = 16

_GLOBALS = frozenset(
    {
        "caller",
        "dict",
        "loop",
        "namespace",
        "raise_exception",
        "range",
        "strftime_now",
    }
)
_METHODS = frozenset(
    {
        "append",
        "capitalize",
        "casefold",
        "changed",
        "count",
        "cycle",
        "endswith",
        "find",
        "get",
        "index",
        "isalnum",
        "isalpha",
        "isdecimal",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "items",
        "join",
        "keys",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "values",
    }
)
_FILTERS = frozenset(
    {
        "abs",
        "attr",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "groupby",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "sum",
        "title",
        "tojson",
        "trim",
        "unique",
        "upper",
    }
)
#: Of conditions of loops: no time is looked at between items that they leave out.
_SHORT_METHODS = frozenset({"endswith", "get", "startswith"})
_SHORT_FILTERS = frozenset({"count", "d", "default", "first", "length", "string"})
#: Filters that name another filter or test, and the position of its name.
_NAMING = {"map": 0, "select": 0, "reject": 0, "selectattr": 1, "rejectattr": 1}
_NOT_PLAIN = (
    nodes.Pow,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.EvalContextModifier,
    nodes.ScopedEvalContextModifier,
)


def is_plain(template: nodes.Template, environment: Environment) -> bool:
    """Return whether a template may be rendered on the event loop."""
    if next(template.find_all(_NOT_PLAIN), None) is not None:
        return False
    macros = {macro.name for macro in template.find_all(nodes.Macro)}
    assigned = {name.name for name in template.find_all(nodes.Name) if name.ctx != "load"}
    known = (_GLOBALS | macros) - assigned
    return (
        all(_plain_call(call, known) for call in template.find_all(nodes.Call))
        and all(_plain_filter(each, environment) for each in template.find_all(nodes.Filter))
        and all(_short_condition(loop) for loop in template.find_all(nodes.For))
    )


def _plain_call(call: nodes.Call, known: frozenset[str]) -> bool:
    called = call.node
    if isinstance(called, nodes.Name):
        return called.name in known
    return isinstance(called, nodes.Getattr) and called.attr in _METHODS


def _plain_filter(each: nodes.Filter, environment: Environment) -> bool:
    if each.name not in _FILTERS or each.dyn_args is not None or each.dyn_kwargs is not None:
        return False
    chain = 0
    inner: nodes.Expr | None = each
    while isinstance(inner, nodes.Filter):
        chain += 1
        inner = inner.node
    if chain > _MAX_CHAIN:
        return False
    position = _NAMING.get(each.name)
    if position is None or position >= len(each.args):
        return True
    named = each.args[position]
    if not isinstance(named, nodes.Const):
        return False
    return named.value in (_FILTERS - _NAMING.keys() if each.name == "map" else environment.tests)


def _short_condition(loop: nodes.For) -> bool:
    """Return whether the condition of a loop, if it has one, takes no time worth mentioning."""
    if loop.test is None:
        return True
    condition = nodes.List([loop.test])
    return all(
        isinstance(call.node, nodes.Getattr) and call.node.attr in _SHORT_METHODS
        for call in condition.find_all(nodes.Call)
    ) and all(each.name in _SHORT_FILTERS for each in condition.find_all(nodes.Filter))
