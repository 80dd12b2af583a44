"""Preprocessing: from a checked client request to the engine's request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dynamo_core import OutputOptions, PreprocessedRequest, RoutingHints, SamplingOptions, StopConditions
from dynamo_core.errors import InvalidArgument

from dynamo_generation.prompts.prompt_budget import PromptBudget
from dynamo_generation.requests.chat import ChatRequest, CheckedChat
from dynamo_generation.requests.generation_request import GenerationRequest
from dynamo_generation.templates.inline_rendering import weigh
from dynamo_generation.templates.messages import raw_prompt, template_messages, template_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_core import ServedModel

    from dynamo_generation.requests.completions import CompletionRequest, PromptInput
    from dynamo_generation.templates.template import ChatTemplate, TemplateStore


#: Items of tools and of template variables that a template takes about a millisecond for.
_MANY = 2000
#: Stands at the end of a message that is to be continued, while the template is rendered.
_END_MARK = "\ue000continue\ue001"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens; `text` is None where the client gave tokens.

    `templating` and `tokenizing` are the seconds that it took to make them; None where there was nothing to make.
    """

    token_ids: list[int]
    text: str | None = None
    templating: float | None = None
    tokenizing: float | None = None


async def chat_prompt(
    checked: CheckedChat,
    raw: dict[str, Any],
    model: ServedModel,
    templates: TemplateStore,
    room: PromptBudget,
    tools: list[dict[str, Any]] | None = None,
) -> Prompt:
    """Return the prompt of a conversation. `tools` are shown to the model.

    Raises:
        InvalidArgument: the template refuses the messages; or there is no room for them.
        TemplateFault: the template takes too long.
    """
    begun = perf_counter()
    request = checked.request
    if request.use_raw_prompt:
        if checked.long:
            await room.check_conversation(raw["messages"])
        text, special = raw_prompt(raw["messages"]), True
    else:
        template = templates.known(model) or await templates.load(model)
        variables = {**template.thinking(tools=tools is not None).values(request.wish), **request.template_variables}
        values = partial(_values, request, raw["messages"], template, tools, variables)
        long = checked.long or bool((tools or variables) and weigh([tools, variables], _MANY) > _MANY)
        if long:
            source = template.source(tools=tools is not None)
            shown_beside = {name: value for name, value in {**variables, "tools": tools}.items() if name in source}
            await room.check_conversation(raw["messages"], shown_beside)
        shown = None if long else templates.render_now(template, values())
        if shown is None:
            shown = await templates.render(template, values, tools=tools is not None, long=long)
        text = _open_ended(shown) if request.continue_final_message else shown
        # A template writes the special tokens itself.
        special = False
    rendered = perf_counter()
    token_ids = await room.encode(text, add_special_tokens=special)
    return Prompt(token_ids, text, None if special else rendered - begun, perf_counter() - rendered)


def _values(
    request: ChatRequest,
    raw: list[dict[str, Any]],
    template: ChatTemplate,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
) -> dict[str, Any]:
    """Return the variables of the template."""
    wish, going_on = request.add_generation_prompt, bool(request.continue_final_message)
    if going_on:
        raw = [*raw[:-1], {**raw[-1], "content": _marked(raw[-1]["content"])}]
    forms = template.forms(tools=tools is not None)
    return template.values(
        template_messages(raw, forms),
        add_generation_prompt=not going_on if wish is None else wish,
        variables=variables,
        tools=template_tools(tools, forms),
    )


def _marked(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a content with the mark at its end. A template that trims the content takes the space off the mark."""
    if isinstance(content, str):
        return f"{content}{_END_MARK} "
    # Beside text there may be parts for engines that take the client's body.
    texts = [part["text"] for part in content if part["type"] == "text"] or [""]
    return [{"type": "text", "text": text} for text in (*texts[:-1], f"{texts[-1]}{_END_MARK} ")]


def _open_ended(text: str) -> str:
    """Return the prompt up to the end of the last message, without what the template writes behind it.

    Raises:
        InvalidArgument: the template does not show the message.
    """
    prompt, mark, rest = text.rpartition(_END_MARK)
    if not mark:
        raise InvalidArgument(
            "Validation: The chat template of the model does not show the last message, so that it cannot be continued",
            field="continue_final_message",
        )
    return prompt if rest.startswith(" ") else prompt.rstrip()


async def text_prompts(
    inputs: Sequence[PromptInput], model: ServedModel, field: str, *, add_special_tokens: bool = True
) -> list[Prompt]:
    """Return the prompts that were given as text or as token ids.

    Raises:
        InvalidArgument: one has no tokens, too many, or tokens the model does not know.
    """
    prompts = []
    room = PromptBudget(model, field)
    await room.check([value for value in inputs if isinstance(value, str)])
    for value in inputs:
        if isinstance(value, str):
            begun = perf_counter()
            token_ids = await room.encode(value, add_special_tokens=add_special_tokens)
            prompt = Prompt(token_ids, value, tokenizing=perf_counter() - begun)
        else:
            # Before its tokens are looked at, which may be a million.
            prompt = fitting(Prompt(value), model, field)
            room.take(len(value))
            size = model.tokenizer.vocab_size
            # An engine that takes text may have a tokenizer of its own.
            if (largest := max(value)) >= size and model.card.model_input != "text":
                raise InvalidArgument(
                    f"Validation: Token id {largest} is not in the vocabulary of the model, which has {size} tokens",
                    field=field,
                )
        prompts.append(fitting(prompt, model, field))
    return prompts


def fitting(prompt: Prompt, model: ServedModel, field: str) -> Prompt:
    """Return the prompt, if it can be answered.

    Raises:
        InvalidArgument: it has no tokens, or too many.
    """
    length = len(prompt.token_ids)
    if not length:
        raise InvalidArgument("Validation: The prompt has no tokens", field=field)
    limit = model.card.context_length
    # An engine that takes text counts its own tokens.
    if limit is not None and length >= limit and model.card.model_input != "text":
        raise InvalidArgument(
            f"Validation: The prompt has {length} tokens and leaves no room for an answer: "
            f"the context of the model is {limit} tokens",
            field=field,
        )
    return prompt


def to_engine(
    request: ChatRequest | CompletionRequest,
    prompt: Prompt,
    model: ServedModel,
    *,
    choice: int = 0,
    body: dict[str, Any] | None = None,
) -> PreprocessedRequest:
    """Return what an engine is asked for one answer to one prompt.

    `choice` counts the answers to one prompt from 0: with a seed, each has a seed of its own. `body` is for engines
    that take text.
    """
    card = model.card
    eos = list(model.tokenizer.eos_token_ids)
    stop = StopConditions(
        max_tokens=_limit(request.token_limit, len(prompt.token_ids), card.context_length),
        stop=request.stops or None,
        stop_token_ids=request.stop_token_ids or None,
        stop_token_ids_hidden=eos or None,
        min_tokens=request.min_tokens,
        ignore_eos=bool(request.ignore_eos),
    )
    stop.apply_ignore_eos()
    return PreprocessedRequest(
        model=card.name,
        token_ids=prompt.token_ids,
        stop_conditions=stop,
        sampling_options=_sampling(request, choice),
        output_options=OutputOptions(logprobs=request.alternatives, skip_special_tokens=request.skip_special_tokens),
        eos_token_ids=eos,
        mdc_sum=card.checksum or None,
        annotations=list(request.annotations),
        routing=_routing(request),
        body=body,
    )


def _routing(request: GenerationRequest) -> RoutingHints | None:
    session = None if request.nvext is None else request.nvext.session_id or None
    if request.priority is None and request.cache_salt is None and session is None:
        return None
    # In vLLM's API, whose field it is, the lowest goes first; among engines the highest does.
    priority = None if request.priority is None else -request.priority
    return RoutingHints(priority=priority, cache_salt=request.cache_salt, session_id=session)


def _limit(wished: int | None, prompt: int, context: int | None) -> int | None:
    """Return the wish, cut to what fits. Without a wish the engine has a default of its own."""
    if context is None or wished is None:
        return wished
    return min(wished, max(context - prompt, 1))


#: The options that a request has under the same names. The engine is asked for each choice by itself, so not `n`.
_SAME = tuple(
    name for name in SamplingOptions.__struct_fields__ if name in GenerationRequest.__struct_fields__ and name != "n"
)
_same_of = attrgetter(*_SAME)


def _sampling(request: GenerationRequest, choice: int) -> SamplingOptions:
    options = SamplingOptions()
    for name, value in zip(_SAME, _same_of(request), strict=True):
        if value is not None:
            setattr(options, name, value)
    options.logit_bias = request.logit_bias or None
    options.guided_decoding = request.guided
    if request.seed is not None:
        options.seed = request.seed + choice
    if request.nvext is not None and request.nvext.greedy:
        options.temperature = 0.0
        options.top_p = options.top_k = options.min_p = None
    return options
