"""The value for absent message content in a template: none, or an empty text."""

from __future__ import annotations

from jinja2 import nodes

_CONTENT = "content"


def asks_for_none(template: nodes.Template) -> bool:
    """Return whether a template looks if a content is none, as some do to tell calls of tools.

    Any other would show the word ``None``, or fail where it adds the content to a text: such a template is for an
    empty text, which is what other servers hand it.
    """
    if any(test.name == "none" and _is_content(test.node) for test in template.find_all(nodes.Test)):
        return True
    for compare in template.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(map(_is_none, sides)) and any(map(_is_content, sides)):
            return True
    return False


def _is_none(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value is None


def _is_content(node: nodes.Node | None) -> bool:
    """Return whether an expression is the content of a message, going by what it is called."""
    match node:
        case nodes.Filter():
            return _is_content(node.node)
        case nodes.Name():
            return node.name == _CONTENT
        case nodes.Getattr():
            return node.attr == _CONTENT
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == _CONTENT
        case nodes.Call():
            return any(isinstance(arg, nodes.Const) and arg.value == _CONTENT for arg in node.args)
    return False
