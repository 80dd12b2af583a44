"""Routes that count the tokens of a conversation. No worker is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web
from dynamo_core.protocol import CHAT

from dynamo_generation.answers.render import encode
from dynamo_generation.endpoints.conversation import ChatDependencies
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint
from dynamo_generation.endpoints.translated_request import TranslatedRequest
from dynamo_generation.requests.ignored_fields import IgnoredFields

if TYPE_CHECKING:
    from dynamo_core import FrontendServices


class CountingEndpoint(ModelEndpoint[TranslatedRequest]):
    """Counts the tokens of a request to be translated. `EXTRA_FIELDS` stands in the answer beside their number."""

    MODEL_TYPE = CHAT
    EXTRA_FIELDS: ClassVar[dict[str, Any]] = {}

    def __init__(self, services: FrontendServices, ignored: IgnoredFields, chats: ChatDependencies) -> None:
        super().__init__(services, ignored)
        self._chats = chats

    async def serve(self, exchange: Exchange, parsed: TranslatedRequest) -> web.StreamResponse:
        """Answer with the number."""
        model = exchange.model
        self._ignored.report(exchange.http, parsed.ignored, self.ENDPOINT)
        if model.card.model_input != "text":
            parsed.check_for_tokens()
        tokens = await parsed.count(model)
        exchange.inflight.prompt_tokens(tokens)
        response = await self.send(exchange, [encode({**self.EXTRA_FIELDS, "input_tokens": tokens})])
        exchange.inflight.succeed(None)
        return response
