"""Requests of other APIs, translated into chat requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from dynamo_core.errors import InvalidArgument

from dynamo_generation.endpoints.conversation import ChatDependencies, ParsedChat

if TYPE_CHECKING:
    from dynamo_core import ServedModel

    from dynamo_generation.prompts.preprocess import Prompt

_NAME = re.compile(r"\w+")


class TranslatedRequest(ParsedChat):
    """A checked request that was made a chat request; `chat` is that one's body."""

    #: What fields of the chat request are called in the API that the client speaks, where that is not the same.
    NAMES: ClassVar[Mapping[str, str]]

    def __init__(self, chat: dict[str, Any], chats: ChatDependencies) -> None:
        with told_as(self.NAMES):
            super().__init__(chat, chats)

    def check_for_tokens(self) -> None:
        """Refuse what cannot be asked of an engine that takes tokens."""
        with told_as(self.NAMES):
            super().check_for_tokens()

    async def count(self, model: ServedModel) -> int:
        """Return how many tokens the conversation has."""
        with told_as(self.NAMES):
            return len((await self.conversation(model, counted=True)).token_ids)

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """Return the conversation as one prompt."""
        with told_as(self.NAMES):
            return await super().prompts(model)


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors in fields of a chat request name those that the client sent.

    Of fields but tools only the first part is told: positions behind it may not be the same.
    """
    try:
        yield
    except InvalidArgument as error:
        field = error.field
        if field is None:
            raise
        if field.startswith("tools["):
            field = field.replace(".function", "")
        else:
            name = _NAME.match(field)
            field = names.get(name[0], name[0]) if name else field
        raise InvalidArgument(error.message, field=field, cause=error) from error
