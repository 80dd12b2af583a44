"""An API plugin: a frontend whose routes ask models, beside other APIs on the same listener."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from dynamo_core import Frontend, FrontendServices, HttpRoute, PluginConfig, TaskSet, Tokenizer
from dynamo_text import load_tokenizer

from dynamo_generation.answers.answer_memory import MB, AnswerMemory
from dynamo_generation.answers.answer_services import Answering
from dynamo_generation.choices.schema_check import SchemaChecker
from dynamo_generation.config import GenerationConfig
from dynamo_generation.endpoints.conversation import ChatDependencies
from dynamo_generation.endpoints.endpoint import ModelEndpoint
from dynamo_generation.endpoints.generation import GenerationEndpoint
from dynamo_generation.endpoints.openapi import Operation
from dynamo_generation.heap import trim_after_growth
from dynamo_generation.prompts.prompt_metrics import call_counter
from dynamo_generation.prompts.token_cache import token_memory
from dynamo_generation.requests.ignored_fields import IgnoredFields
from dynamo_generation.templates.template import TemplateStore, describe_template

#: Seconds that streams of ended requests get to let go of what they hold.
_CLOSE_TIMEOUT = 5.0


class Generation:
    """State that the APIs of one process share: templates, tokenizers, checks of answers, memory of whole answers."""

    _all: ClassVar[dict[FrontendServices, Generation]] = {}

    def __init__(self, config: GenerationConfig, services: FrontendServices) -> None:
        tasks = TaskSet()
        self._tasks = tasks
        self._giving_back: asyncio.Task[None] | None = None
        self._services = services
        self._users = 0
        self._token_memory = token_memory(services)
        self._checker = SchemaChecker(services)
        self.chats = ChatDependencies(
            TemplateStore(config.template_timeout),
            hide_tools=config.exclude_tools_when_tool_choice_none,
            count_calls=call_counter(services),
        )
        self.ignored = IgnoredFields(services, unknown=config.unknown_fields == "ignore")
        memory = AnswerMemory(services, config.unary_answer_limit_mb * MB, config.unary_answers_limit_mb * MB)
        self.answering = Answering(tasks, config.write_buffer, memory, self._checker)
        #: The operations of all APIs, for a description of them.
        self.operations: list[Operation] = []

    @classmethod
    def of(cls, config: GenerationConfig, services: FrontendServices) -> Generation:
        """Return that of these services, which is made for the first API and closed by the last."""
        found = cls._all.get(services)
        if found is None:
            found = cls._all[services] = cls(config, services)
        found._users += 1
        return found

    @classmethod
    def find(cls, services: FrontendServices) -> Generation:
        """Return that of these services, which has at least one API that is not closed.

        Raises:
            KeyError: all of them are closed, or none was made.
        """
        return cls._all[services]

    def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Tokenizer:
        """Make the tokenizer of a model; all of them share one memory of prompts."""
        return load_tokenizer(kind, files, self._token_memory)

    async def start(self) -> None:
        """Begin to give back memory that large requests took."""
        if self._giving_back is None:
            self._giving_back = self._tasks.spawn(trim_after_growth(), name="give-back-memory")

    async def aclose(self) -> None:
        """Wait a while for streams that are still being closed, then end that too, for the last API that is closed."""
        self._users -= 1
        if self._users > 0:
            return
        self._all.pop(self._services, None)
        if self._giving_back is not None:
            self._giving_back.cancel()
        await self._tasks.join(_CLOSE_TIMEOUT)
        await self._tasks.aclose()
        await self.chats.templates.aclose()
        await self._checker.aclose()


class Api(Frontend):
    """A frontend that generates. Subclasses list their operations."""

    Config: ClassVar[type[PluginConfig]] = GenerationConfig

    config: GenerationConfig

    def __init__(self, config: PluginConfig, services: FrontendServices) -> None:
        super().__init__(config, services)
        self.generation = Generation.of(self.config, services)
        self._open = True

    @abstractmethod
    def operations(self) -> Iterable[Operation]:
        """Return the routes, and how their bodies are read. Called once."""

    def routes(self) -> Iterable[HttpRoute]:
        """Return the routes, with their paths from the settings."""
        own = list(self.operations())
        self.generation.operations += own
        return [operation.route for operation in own]

    def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Tokenizer:
        """Make the tokenizer of a model; all of them share one memory of prompts."""
        return self.generation.load_tokenizer(kind, files)

    @classmethod
    def describe_template(cls, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return the forms of messages that a model's chat template reads; nothing if it has none."""
        return asyncio.run(describe_template(files))

    async def start(self) -> None:
        """Begin what runs behind the requests of all APIs."""
        await self.generation.start()

    async def aclose(self) -> None:
        """End it with the last API."""
        if self._open:
            self._open = False
            await self.generation.aclose()


def post(path: str, endpoint: ModelEndpoint[Any], answer: type[msgspec.Struct], summary: str) -> Operation:
    """Return the operation of a route that asks a model."""
    route = HttpRoute("POST", path, endpoint.handle, summary, respond_error=endpoint.respond_error)
    operation = Operation(route, endpoint.BODY, endpoint.PASSIVE, answer, error=endpoint.ERROR)
    if isinstance(endpoint, GenerationEndpoint):
        return replace(operation, streams=True, stream_type=endpoint.FRAMING.content_type)
    return operation
