"""A checked request that generates: what differs between chat and text completions, and between APIs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_core.errors import InvalidArgument
from dynamo_text import StopStrings

from dynamo_generation.answers.render import BodyRenderer, ChunkRenderer, Collected, Identity
from dynamo_generation.answers.render_token_ids import Inner, TokenIds
from dynamo_generation.choices.choice import Choice, TokenChoice
from dynamo_generation.prompts.preprocess import Prompt
from dynamo_generation.requests.chat import ChatRequest
from dynamo_generation.requests.completions import CompletionRequest
from dynamo_generation.requests.fields import raise_found

if TYPE_CHECKING:
    from dynamo_core import PreprocessedRequest, ServedModel


class Renderer(ChunkRenderer, BodyRenderer, Protocol):
    """Makes both forms of an answer."""

    def extension(self, values: dict[str, Any]) -> bytes:
        """Return a chunk without choices whose `nvext` holds annotations; empty if there are none."""


class ParsedRequest(ABC):
    """A checked body of one kind: what differs between chat and text completions."""

    def __init__(
        self,
        raw: dict[str, Any],
        request: ChatRequest | CompletionRequest,
        refusal: InvalidArgument | None = None,
    ) -> None:
        self.raw = raw
        self.request = request
        self._refusal = refusal
        #: Parts of the client's body that are left out, and of which it is told.
        self.ignored: Sequence[str] = ()

    def check_for_tokens(self) -> None:
        """Refuse what cannot be asked of an engine that takes tokens.

        Raises:
            InvalidArgument: naming the field.
        """
        raise_found(self._refusal)

    def release_body(self) -> None:
        """Let go of the body, of which a prompt has been made."""
        self.raw = {}

    def body_of_one(self, prompt: int, choice: int) -> dict[str, Any]:
        """Return the body that asks for one answer to one of the prompts, both counted from 0."""
        body = {name: value for name, value in self.raw.items() if name not in ("n", "best_of")}
        if self.request.seed is not None:
            body["seed"] = self.request.seed + choice
        return body

    @abstractmethod
    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """Return the prompts as tokens.

        Raises:
            InvalidArgument: naming the field.
        """

    def choice(
        self, index: int, request: PreprocessedRequest, prompt: Prompt, model: ServedModel, stops: StopStrings | None
    ) -> Choice:
        """Return what reads one answer of an engine that gives tokens. May still change what the engine is asked."""
        return TokenChoice(index, request, model.tokenizer, stops)

    def best_of(self, collected: Sequence[Collected], model: ServedModel) -> Sequence[Collected]:
        """Return those of the whole answers that the client gets."""
        return collected

    def with_tokens(self, renderer: Inner, prompts: Sequence[Prompt], model: ServedModel, *, beside: bool) -> Renderer:
        """Return what writes the answer, with its tokens if the client wants them.

        An engine that takes text has none.
        """
        if not self.request.return_token_ids or model.card.model_input == "text":
            return renderer
        return TokenIds(renderer, [prompt.token_ids for prompt in prompts], beside=beside)

    @abstractmethod
    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> Renderer:
        """Return what writes the answer."""
