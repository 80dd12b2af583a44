"""Rendering on the event loop, for plain templates and within a short time limit.

What could add up is bounded: the time, at each turn of a loop and each call of a macro; the size of texts and lists,
before they are made. What is beyond that is no error: it is rendered in a process of its own instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from time import perf_counter, thread_time
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_indent, do_join, do_replace, do_trim
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, new_context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynamo_generation.templates.child import environment, tojson

#: Seconds that a rendering may take on the event loop; then half as much again of processor time, for a busy machine.
SECONDS = 0.020
#: Characters that a text may get, and items that a list may get; names and values of objects count as items.
MAX_TEXT = 1 << 20
MAX_ITEMS = 20_000
#: Characters that weigh as much as an item.
_ITEM = MAX_TEXT // MAX_ITEMS
#: The largest number that is computed with, in bits.
_MAX_BITS = 4096
#: Characters of an argument that a text is searched for from its end, or stripped of: each may be looked at for each.
_MAX_SOUGHT = 64
#: Statements in a row after which the time is looked at.
_STRIDE = 32
_SMALL_INDENT = 16
#: Pieces of text that are taken at once.
_PIECES = 512


class RenderLimitExceeded(Exception):
    """The template is not for the event loop, or not with these values."""


def weigh(value: Any, most: int) -> int:
    """Return how many items a value has, all the way down; more than `most` if it is more than that.

    An item that is there twice counts twice, as it does for code that walks the value. So does a text, by its length.
    """
    left = most
    stack = [value]
    while stack and left >= 0:
        top = stack.pop()
        if isinstance(top, str):
            left -= len(top) // _ITEM
        elif isinstance(top, dict):
            left -= len(top)
            stack += top.values()
        elif isinstance(top, list | tuple):
            left -= len(top)
            stack += top
    return most - left


def _check_text(size: int) -> None:
    if size > MAX_TEXT:
        raise RenderLimitExceeded


def _joined(parts: Iterable[Any]) -> str:
    texts = [part if type(part) is str else str(part) for part in parts]
    _check_text(sum(map(len, texts)))
    return "".join(texts)


def _listed(values: Iterable[Any]) -> Sequence[Any]:
    """Return the values as a list, however they come."""
    if not isinstance(values, Sequence):
        values = list(islice(values, MAX_ITEMS + 1))
    if len(values) > MAX_ITEMS:
        raise RenderLimitExceeded
    return values


class BoundedContext(Context):
    """The state of one rendering."""

    #: Until when it may go on, as `perf_counter` has it.
    deadline = 0.0
    #: The processor time of the thread when the time was over first.
    _late: float | None = None

    def tick(self) -> None:
        """Look at the time.

        Raises:
            RenderLimitExceeded: it is over.
        """
        if perf_counter() > self.deadline:
            self._look()

    def _look(self) -> None:
        """Renew the deadline if other tasks or a garbage collection used the time; else raise."""
        used = thread_time()
        if self._late is None:
            self._late = used
        elif used - self._late > SECONDS / 2:
            raise RenderLimitExceeded
        self.deadline = perf_counter() + SECONDS

    def joined(self, parts: Sequence[Any]) -> str:
        """Return parts as one text."""
        return _joined(parts)

    def built(self, value: Any) -> Any:
        """Return a list or an object that the template has made."""
        if weigh(value, MAX_ITEMS) > MAX_ITEMS:
            raise RenderLimitExceeded
        return value


class _CodeGenerator(CodeGenerator):
    """Has the time looked at, and sizes checked."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._repeated: set[int] = set()
        self._shown: set[int] = set()

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - jinja2 calls it so
        self._repeated.add(id(node.body))
        super().visit_Template(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        self._repeated.add(id(node.body))
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> Any:
        self._repeated.add(id(node.body))
        return super().macro_body(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        body = list(nodes)
        if id(nodes) in self._repeated:
            self.writeline("context.tick()")
        for start in range(0, len(body), _STRIDE):
            if start:
                self.writeline("context.tick()")
            super().blockvisit(body[start : start + _STRIDE], frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        for child in node.nodes:
            self._shown |= _sum_of(child)
        super().visit_Output(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        if id(node) not in self._shown:
            super().visit_Add(node, frame)
            return
        # What is only shown does not grow any further, and asking the environment takes longer than adding.
        self.write("(")
        self.visit(node.left, frame)
        self.write(" + ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        self.write("context.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        self._checked(node, frame, super().visit_List)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        if node.ctx == "load":
            self._checked(node, frame, super().visit_Tuple)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        self._checked(node, frame, super().visit_Dict)

    def _checked(self, node: nodes.Expr, frame: Frame, visit: Callable[[Any, Frame], None]) -> None:
        try:
            node.as_const(frame.eval_ctx)
        except nodes.Impossible:
            self.write("context.built(")
            visit(node, frame)
            self.write(")")
        else:
            visit(node, frame)


def _sum_of(shown: nodes.Expr) -> set[int]:
    """Return the additions that make an expression, unless they are many."""
    found: set[int] = set()
    stack = [shown]
    while stack:
        top = stack.pop()
        if isinstance(top, nodes.Add):
            found.add(id(top))
            stack += [top.left, top.right]
    return found if len(found) <= _STRIDE else set()


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let each call look at the time, as a filter may call another filter or a test for each of many items."""

    def call(
        self: Environment,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Context | None = None,
        eval_ctx: EvalContext | None = None,
    ) -> Any:
        if isinstance(context, BoundedContext):
            context.tick()
        return method(self, name, value, args, kwargs, context, eval_ctx)

    return call


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A jinja2 environment for plain templates."""

    code_generator_class = _CodeGenerator
    context_class = BoundedContext
    concat = staticmethod(_joined)
    intercepted_binops = frozenset({"+", "*", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, within bounds where the result may be much larger than its arguments."""
        if isinstance(left, str):
            if operator != "+":
                raise RenderLimitExceeded
            _check_text(len(left) + len(right) if isinstance(right, str) else 0)
        elif isinstance(left, list | tuple):
            if operator != "+" or weigh(left, MAX_ITEMS) + weigh(right, MAX_ITEMS) > MAX_ITEMS:
                raise RenderLimitExceeded
        elif operator == "*":
            if not isinstance(right, int | float):
                raise RenderLimitExceeded
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
                raise RenderLimitExceeded
        return super().call_binop(context, operator, left, right)

    call_filter = _counted(Environment.call_filter)
    call_test = _counted(Environment.call_test)

    def call(self, context: Context, obj: Any, /, *args: Any, **options: Any) -> Any:
        """Call an object; of some methods the size of the result is checked."""
        check = _CHECKS.get(getattr(obj, "__name__", ""))
        if check is not None and isinstance(text := getattr(obj, "__self__", None), str):
            args = check(text, args)
        return super().call(context, obj, *args, **options)


def bounded_environment() -> BoundedEnvironment:
    """Return an environment for plain templates."""
    made = environment(BoundedEnvironment)
    made.globals |= {"range": _range, "dict": _dict, "strftime_now": _strftime}
    made.filters |= {"join": _join, "replace": _replace, "indent": _indent, "trim": _trim, "tojson": _tojson}
    return made


def _check_replace(text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_text(len(text) + text.count(args[0]) * len(args[1]))
    return args


def _check_join(text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    values = _listed(args[0]) if args else ()
    _check_text(len(text) * len(values) + sum(len(value) for value in values if isinstance(value, str)))
    return (values, *args[1:])


def _check_sought(text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if args and isinstance(args[0], str) and len(args[0]) > _MAX_SOUGHT:
        raise RenderLimitExceeded
    return args


_CHECKS: Mapping[str, Callable[[str, tuple[Any, ...]], tuple[Any, ...]]] = {
    "replace": _check_replace,
    "join": _check_join,
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rsplit", "rpartition"), _check_sought),
}


def _range(*args: int) -> range:
    made = range(*args)
    if len(made) > MAX_ITEMS:
        raise RenderLimitExceeded
    return made


def _strftime(format: str) -> str:
    if len(format) > _MAX_SOUGHT:
        raise RenderLimitExceeded
    return time.strftime(format)


def _dict(*args: Any, **options: Any) -> dict[Any, Any]:
    made = dict(*args, **options)
    if weigh(made, MAX_ITEMS) > MAX_ITEMS:
        raise RenderLimitExceeded
    return made


class PlainTemplate:
    """A compiled template that is plain."""

    def __init__(self, template: Template) -> None:
        self._template = template
        # `Template.render` gathers them anew each time, which takes as long as the rest of a short template.
        self._globals = dict(template.globals)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text; `values` are the variables.

        Raises:
            RenderLimitExceeded: it takes too long, or gets too long.
            Exception: the template, or something that it calls, has failed.
        """
        template = self._template
        context: Any = new_context(
            template.environment, template.name, template.blocks, {**self._globals, **values}, shared=True
        )
        context.deadline = perf_counter() + SECONDS
        pieces = template.root_render_func(context)
        parts: list[str] = []
        while True:
            # A few at a time, for one that has no end.
            some = list(islice(pieces, _PIECES))
            parts += some
            if len(some) < _PIECES:
                break
            _check_text(sum(map(len, parts)))
        text = "".join(parts)
        _check_text(len(text))
        return text


# Filters are given the context so that none is called when a template is compiled.


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    values = _listed(value)
    if attribute is None:
        return _joined(_between(values, d))
    _check_text(len(str(d)) * len(values))
    return str(do_join(context.eval_ctx, values, d, attribute))


def _between(values: Sequence[Any], separator: Any) -> Iterable[Any]:
    for index, value in enumerate(values):
        if index:
            yield separator
        yield value


@pass_context
def _replace(context: Context, s: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(s)
    _check_text(len(text) + text.count(str(old)) * len(str(new)))
    return do_replace(context.eval_ctx, text, old, new, count)


@pass_context
def _indent(context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(s)
    _check_text(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return do_indent(text, width, first, blank)


@pass_context
def _trim(_: Context, value: Any, chars: str | None = None) -> str:
    if chars is not None and len(chars) > _MAX_SOUGHT:
        raise RenderLimitExceeded
    return do_trim(value, chars)


@pass_context
def _tojson(
    _: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if (indent or 0) > _SMALL_INDENT or (separators is not None and sum(map(len, separators)) > _SMALL_INDENT):
        raise RenderLimitExceeded
    return tojson(value, ensure_ascii, indent, separators, sort_keys)
