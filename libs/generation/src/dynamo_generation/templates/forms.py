"""The message forms that a chat template can read."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL = "system", "developer", "user", "assistant", "tool"


class ContentForm(enum.Enum):
    """A form of content that a template shows completely."""

    TEXT = "text"
    TEXT_OR_PARTS = "text or parts"
    PARTS = "parts"
    ONE_PART = "one part"


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """The forms that one template reads, and the changes without which it loses or refuses messages."""

    #: By role. The content of a role that is not here is text.
    contents: Mapping[str, ContentForm] = field(default_factory=dict)
    #: The arguments of a call are JSON text, else an object.
    text_arguments: bool = False
    #: The content of a message that only calls tools.
    no_content: str | None = ""
    #: The keys of a message under which the template reads reasoning.
    reasoning: tuple[str, ...] = ()
    #: Reasoning is a part of the content.
    reasoning_part: bool = False
    #: Ids of calls have nine letters and digits.
    short_ids: bool = False
    #: A tool that has no description, or no parameters, is given empty ones.
    whole_tools: bool = False
    #: A developer message becomes a system message.
    developer_as_system: bool = False
    #: System messages at the beginning become one.
    one_system: bool = False
    #: A later system message becomes a user message.
    late_system_as_user: bool = False
    #: A later system message joins the first.
    late_system_first: bool = False
    #: User messages in a row become one.
    one_user: bool = False
    #: Each call has a message of its own, before its result.
    one_call: bool = False
    #: Calls have a message of their own, after that of the text beside them.
    calls_apart: bool = False
    #: Text beside calls becomes the end of the reasoning.
    text_as_reasoning: bool = False

    @property
    def rearranges(self) -> bool:
        """Whether messages are joined, split or get another role."""
        return any(
            (
                self.developer_as_system,
                self.one_system,
                self.late_system_as_user,
                self.late_system_first,
                self.one_user,
                self.one_call,
                self.calls_apart,
                self.text_as_reasoning,
            )
        )

    def describe(self) -> Iterator[tuple[str, str]]:
        """Yield what operators may want to know, as names and values."""
        forms = {role: form.value for role, form in self.contents.items()}
        same = set(forms.values())
        yield "content", "; ".join(same if len(same) < 2 else (f"{role}: {form}" for role, form in forms.items()))
        yield "arguments of calls", "text" if self.text_arguments else "object"
        yield "content of calls", "null" if self.no_content is None else "empty text"
        yield "reasoning", "a part" if self.reasoning_part else ", ".join(self.reasoning) or "not shown"
        changes = [text for name, text in _CHANGES.items() if getattr(self, name)]
        if changes:
            yield "changed", "; ".join(changes)


_CHANGES: Mapping[str, str] = {
    "short_ids": "ids of calls have nine characters",
    "whole_tools": "tools have a description and parameters",
    "developer_as_system": "developer messages become system messages",
    "one_system": "system messages at the beginning become one",
    "late_system_as_user": "later system messages become user messages",
    "late_system_first": "later system messages join the first",
    "one_user": "user messages in a row become one",
    "one_call": "each call has a message of its own",
    "calls_apart": "calls have a message apart from text",
    "text_as_reasoning": "text beside calls joins the reasoning",
}
