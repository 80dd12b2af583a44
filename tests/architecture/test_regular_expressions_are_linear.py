"""Every regular expression of the product is listed: one that meets foreign text takes linear time, whatever comes."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from dynamo_plugin_parsers_standard import literal_patterns
from dynamo_plugin_parsers_standard.json_formats import MistralParser
from dynamo_plugin_parsers_standard.reasoning_regions import _anchor
from dynamo_plugin_parsers_standard.response_template import Template, _word
from dynamo_plugin_parsers_standard.scanner import Tags
from dynamo_plugin_parsers_standard.tagged_parameters import _key_before
from dynamo_text.text_splitter import TextSplitter
from dynamo_wire.brokered import addresses

from tests.architecture.regular_expressions import SEARCHING, Site, hard_inputs, sites, sites_of

#: Expressions that meet only text of people who are trusted, and whose it is.
OWN = {
    "dynamo_runtime.cli.new:_NAME": "the command line",
    "dynamo_core.contracts.http_route:_VARIABLE": "paths of a plugin's routes",
    "dynamo_core.lazy:_IMPORT": "stubs of a package",
    "dynamo_core.lazy:_NAME": "stubs of a package",
    "dynamo_runtime.assembly.resolve:_placed.key": "a plugin's complaint about settings",
    "dynamo_runtime.engine_process:_LABEL": "labels that an engine sets",
    "dynamo_runtime.standalone_engine_settings:worker_word": "the name of an engine",
    "dynamo_runtime.settings.documents:_HEADER": "the config",
    "dynamo_runtime.settings.documents:_ASSIGNMENT": "the config",
    "dynamo_runtime.settings.documents:_KEY_PART": "the config",
    "dynamo_runtime.settings.documents:_read_toml.at_line": "what the parser of the config says",
    "dynamo_runtime.settings.entries:_NAME": "the config",
    "dynamo_runtime.settings.flag_table:_KEY": "a file of an installed package",
    "dynamo_runtime.settings.flag_table:_FLAG": "a file of an installed package",
    "dynamo_runtime.settings.flag_table:_ENV": "a file of an installed package",
    "dynamo_runtime.settings.loader:_NOT_IN_NAMES": "the config",
    "dynamo_core.contracts.field_types:Word": "the config",
    "dynamo_runtime.settings.model:WorkerName": "the config",
    "dynamo_http.settings:Origin": "the config",
    "dynamo_http.settings:HeaderName": "the config",
    "dynamo_http.settings:_HASH": "the config",
    "dynamo_http.settings:HttpSettings.metrics_prefix": "the config",
    "dynamo_runtime.settings.secrets_in_settings:_HASH": "the config",
    "dynamo_runtime.settings.secrets_in_settings:_REFERENCE": "the config",
    "dynamo_runtime.settings.schema:_add_plugin.prefix": "names of plugins",
    "dynamo_core.plugin_files:_NAME": "the config",
    "dynamo_telemetry.metrics:_NAME": "names of metrics",
    "dynamo_telemetry.metrics:_LABEL": "names of labels",
    "dynamo_testing.frontend_kit:_PATH": "a kit's plugin under test",
    "dynamo_testing.parser.piecewise_parsing:at_markers": "a kit's answers",
    "dynamo_testing.settings_checks:listed_settings.test.rows": "a page of a plugin",
    "dynamo_testing.settings_checks:listed_settings.test.listed": "a page of a plugin",
    "dynamo_plugin_admission_rate_limit.config:RuleSettings.name": "the config",
    "dynamo_plugin_discovery_kubernetes.config:KubernetesConfig.namespace": "the config",
    "dynamo_plugin_discovery_kubernetes.config:KubernetesConfig.pod": "the config",
    "dynamo_plugin_discovery_kubernetes.config:KubernetesConfig.prefix": "the config",
    "dynamo_plugin_engine_transformers.config:TransformersConfig.device": "the config",
    "dynamo_plugin_extension_otel_metrics.settings:_HEADER": "the environment",
    "dynamo_generation.config:Path": "the config",
    "dynamo_generation.endpoints.openapi:_VARIABLE": "paths of a plugin's routes",
    "dynamo_plugin_transport_nats.config:_PREFIX": "the config",
    "dynamo_plugin_transport_redis.config:_PREFIX": "the config",
}
#: Expressions that meet text of others, and where it comes from.
FOREIGN = {
    "dynamo_http.client_headers:_NOT_TEXT": "headers of clients",
    "dynamo_runtime.dispatch.models.files:_SHA256": "records",
    "dynamo_http.cors:_NAMES": "headers of clients",
    "dynamo_core.protocol.ids:_HEX": "records and messages",
    "dynamo_runtime.settings.secrets_in_settings:_SECRET_WORDS": "names in messages of servers",
    "dynamo_runtime.settings.secrets_in_settings:_TOKEN": "names in messages of servers",
    "dynamo_runtime.settings.secrets_in_settings:_TOKENS": "names in messages of servers",
    "dynamo_runtime.settings.secrets_in_settings:_ADDRESS": "names in messages of servers",
    "dynamo_runtime.settings.secrets_in_settings:_QUERY": "messages of servers",
    "dynamo_runtime.settings.secrets_in_settings:_ASSIGNED": "messages of servers",
    "dynamo_telemetry.logs:_KEY": "whatever is logged",
    "dynamo_telemetry.logs:_LOGIN": "whatever is logged",
    "dynamo_telemetry.logs:_QUERY": "whatever is logged",
    "dynamo_telemetry.logs:_shown": "whatever is logged",
    "dynamo_runtime.telemetry.otel:_HEX": "messages of frontends",
    "dynamo_core.tracing:_TRACEPARENT": "headers of clients",
    "dynamo_core.tracing:_STATE_KEY": "headers of clients",
    "dynamo_core.tracing:_STATE_VALUE": "headers of clients",
    "dynamo_text.json_calls:_SPACE": "answers of models",
    "dynamo_text.json_value:_STRING": "answers of models",
    "dynamo_text.json_value:_HIGH_SURROGATE": "answers of models",
    "dynamo_text.json_value:_SPACE": "answers of models",
    "dynamo_text.split_pattern:_Reader._bounds.found": "folders of models",
    "dynamo_text.split_pattern:_Reader._property.found": "folders of models",
    "dynamo_text.text_splitter:_OVER_A_WORD_END": "folders of models",
    "dynamo_text.text_splitter:TextSplitter.__init__._next": "prompts",
    "dynamo_text.text_splitter:_WordBoundaries._normalizers_keep_it": "folders of models",
    "dynamo_text.text_splitter:_WordBoundaries._split": "folders of models",
    "dynamo_text.text_splitter:_WordBoundaries._no_token_spans_it.over": "folders of models",
    "dynamo_wire.brokered.addresses:_LINK": "messages of brokers",
    "dynamo_wire.brokered.addresses:_PLAIN": "messages of brokers",
    "dynamo_wire.brokered.addresses:Addresses.__init__._worker": "records",
    "dynamo_plugin_engine_mocker.tokens.scores:_WORD": "prompts",
    "dynamo_plugin_engine_upstream.server_errors:_BLANKS": "messages of servers",
    "dynamo_plugin_engine_upstream.server_errors:_ADDRESS": "messages of servers",
    "dynamo_plugin_engine_upstream.server_errors:_PATH": "messages of servers",
    "dynamo_plugin_engine_upstream.server_errors:status_error.field": "messages of servers",
    "dynamo_plugin_engine_upstream.sse:_LINE_END": "answers of servers",
    "dynamo_generation.requests.ignored_fields:_UNSAFE": "bodies of clients",
    "dynamo_plugin_frontend_anthropic.endpoint:_SPAN": "headers of servers",
    "dynamo_generation.bodies.decode:_BYTE": "bodies of clients, in words of the parser",
    "dynamo_generation.bodies.decode:_PATH": "bodies of clients, in words of the parser",
    "dynamo_generation.bodies.decode:_FIELD": "bodies of clients, in words of the parser",
    "dynamo_generation.bodies.decode:_EXPECTED": "bodies of clients, in words of the parser",
    "dynamo_generation.requests.tools:_NAME": "bodies of clients",
    "dynamo_generation.endpoints.translated_request:_NAME": "bodies of clients",
    "dynamo_plugin_parsers_standard.formats:Header.word": "answers of models",
    "dynamo_plugin_parsers_standard.gemma_calls:_NAME": "answers of models",
    "dynamo_plugin_parsers_standard.gemma_calls:_KEY": "answers of models",
    "dynamo_plugin_parsers_standard.gemma_calls:_BARE": "answers of models",
    "dynamo_plugin_parsers_standard.harmony:_CONTINUED": "answers of models",
    "dynamo_plugin_parsers_standard.harmony:_HEADER": "answers of models",
    "dynamo_plugin_parsers_standard.json_formats:_KIMI_ID": "answers of models",
    "dynamo_plugin_parsers_standard.json_formats:MistralParser.FORMAT": "answers of models",
    "dynamo_plugin_parsers_standard.json_formats:KimiK2Parser.FORMAT": "answers of models",
    "dynamo_plugin_parsers_standard.state_machine:_Compiled.__init__.gap": "answers of models",
    "dynamo_plugin_parsers_standard.literal_patterns:_PIECE": "folders of models",
    "dynamo_plugin_parsers_standard.literal_patterns:_ESCAPE": "folders of models",
    "dynamo_plugin_parsers_standard.literal_patterns:_choices.literals": "folders of models",
    "dynamo_plugin_parsers_standard.pythonic_calls:_NAME": "answers of models",
    "dynamo_plugin_parsers_standard.pythonic_calls:_PLAIN": "answers of models",
    "dynamo_plugin_parsers_standard.pythonic_calls:_IN_STRING": "answers of models",
    "dynamo_plugin_parsers_standard.pythonic_calls:_IN_STRING #2": "answers of models",
    "dynamo_plugin_parsers_standard.reasoning_regions:_NOTHING": "answers of models",
    "dynamo_plugin_parsers_standard.reasoning_regions:_anchor": "prompts",
    "dynamo_plugin_parsers_standard.response_template:_word.chars": "folders of models",
    "dynamo_plugin_parsers_standard.response_template:_word": "answers of models",
    "dynamo_plugin_parsers_standard.scanner:_SPACE": "answers of models",
    "dynamo_plugin_parsers_standard.scanner:Tags.__init__._pattern": "answers of models",
    "dynamo_plugin_parsers_standard.scanner:Tags.__init__._firsts": "answers of models",
    "dynamo_plugin_parsers_standard.schema_values:_INTEGER": "answers of models",
    "dynamo_plugin_parsers_standard.schema_values:_NUMBER": "answers of models",
    "dynamo_plugin_parsers_standard.schema_values:_PYTHON_STRING": "answers of models",
    "dynamo_plugin_parsers_standard.tagged_parameters:_NAME": "answers of models",
    "dynamo_plugin_parsers_standard.tagged_parameters:_key_before": "answers of models",
    "dynamo_plugin_parsers_standard.think_tags:_NEWLINES": "answers of models",
    "dynamo_plugin_router_slot_tracker.replication.addresses:_port_number": "bodies of clients",
    "dynamo_plugin_router_slot_tracker.replication.addresses:_host_name": "bodies of clients",
    "dynamo_plugin_router_slot_tracker.replication.addresses:_ends_in_digits": "bodies of clients",
    "dynamo_plugin_router_slot_tracker.decoding:_at_byte": "bodies of clients, in words of the parser",
    "dynamo_plugin_router_slot_tracker.decoding:_steps": "bodies of clients, in words of the parser",
    "dynamo_plugin_router_slot_tracker.decoding:_refusal": "bodies of clients, in words of the parser",
    "dynamo_plugin_router_slot_tracker.json_positions:_space": "bodies of clients",
    "dynamo_plugin_router_slot_tracker.schemas:WorkerId": "bodies of clients",
    "dynamo_plugin_router_slot_tracker.strict_json:_minus_zero": "bodies of clients",
    "dynamo_plugin_router_slot_tracker.strict_json:_escaped_letter": "bodies of clients",
}


def _tags() -> Tags:
    return Tags(("<tool_call>", "<|call|>", "[TOOL_CALLS]", "a"))


#: Makes those that are no literals, as the product does.
MADE: dict[str, Callable[[], re.Pattern[Any]]] = {
    "dynamo_text.text_splitter:TextSplitter.__init__._next": lambda: _owner(
        TextSplitter(["<s>", "a  a"], words=True)._next
    ),
    "dynamo_text.text_splitter:_WordBoundaries._normalizers_keep_it": lambda: re.compile("[a-z▁ ]"),
    "dynamo_text.text_splitter:_WordBoundaries._split": lambda: re.compile("[a-z▁]"),
    "dynamo_text.text_splitter:_WordBoundaries._no_token_spans_it.over": lambda: re.compile("[a-z]▁"),
    "dynamo_wire.brokered.addresses:_LINK": lambda: addresses._LINK,
    "dynamo_wire.brokered.addresses:Addresses.__init__._worker": lambda: addresses.Addresses("a", ".")._worker,
    "dynamo_plugin_parsers_standard.state_machine:_Compiled.__init__.gap": lambda: MistralParser._compiled.gap,
    "dynamo_plugin_parsers_standard.literal_patterns:_PIECE": lambda: literal_patterns._PIECE,
    "dynamo_plugin_parsers_standard.reasoning_regions:_anchor": lambda: _anchor(
        Template({}, start_anchor_pattern=r"<\|start\|>\s*a\s*(?:b|c)\s*")
    ),
    "dynamo_plugin_parsers_standard.response_template:_word.chars": lambda: re.compile(r"[^\s<]"),
    "dynamo_plugin_parsers_standard.response_template:_word": lambda: _word(
        literal_patterns.Named("name", r"[^<\s]"), ("<",)
    ),
    "dynamo_plugin_parsers_standard.scanner:Tags.__init__._pattern": lambda: _tags()._pattern,
    "dynamo_plugin_parsers_standard.scanner:Tags.__init__._firsts": lambda: _tags()._firsts,
    "dynamo_plugin_parsers_standard.tagged_parameters:_key_before": lambda: _key_before(">"),
}


def _owner(method: Any) -> re.Pattern[Any]:
    pattern: re.Pattern[Any] = method.__self__
    return pattern


@cache
def found() -> dict[str, Site]:
    return sites()


def pattern_of(name: str) -> re.Pattern[Any]:
    site = found()[name]
    return MADE[name]() if site.literal is None else re.compile(site.literal, site.flags)


def uses(name: str) -> list[Callable[..., Any]]:
    return _uses(found()[name])


def _uses(site: Site) -> list[Callable[..., Any]]:
    """Return what is done with an expression; those that go on in other modules begin at a place."""
    methods = site.methods or {"match", "fullmatch"}
    plain = [getattr(re.Pattern, method) for method in sorted(methods - SEARCHING)]
    return [*plain, *([lambda pattern, text: deque(pattern.finditer(text), 0)] if methods & SEARCHING else [])]


def cost(use: Callable[..., Any], pattern: re.Pattern[Any], text: Any) -> float:
    """Return the seconds of processor time that one use takes."""
    begun = time.process_time()
    use(pattern, text)
    return time.process_time() - begun


def is_linear(use: Callable[..., Any], pattern: re.Pattern[Any], once: Any, twice: Any) -> bool:
    """Return whether the second takes about twice the time of the first: the least of some tries."""
    first = second = 1e9
    for _ in range(6):
        first, second = min(first, cost(use, pattern, once)), min(second, cost(use, pattern, twice))
        if second <= 3 * first + 0.001:
            return True
        if second > 0.3:
            break
    return False


def slow_input(pattern: re.Pattern[Any], uses: list[Callable[..., Any]]) -> tuple[str, str, str] | None:
    """Return the first input that shows that an expression is not linear; None where none does."""
    for lead, part, end in dict.fromkeys(hard_inputs(pattern)):
        # Few repeats first: what is exponential would not end with more.
        for count in (8, 16, 60, max(12, 4000 // len(part))):
            texts: list[Any] = [lead + part * number + end for number in (count, 2 * count)]
            if isinstance(pattern.pattern, bytes):
                texts = [text.encode("latin-1") for text in texts]
            if not all(is_linear(use, pattern, *texts) for use in uses):
                return lead, part, end
    return None


def test_each_expression_is_listed_once_with_the_origin_of_its_input() -> None:
    assert not set(OWN) & set(FOREIGN)
    assert sorted(found()) == sorted({**OWN, **FOREIGN})
    assert all({**OWN, **FOREIGN}.values())


@pytest.mark.timeout(300)
def test_twice_a_foreign_text_takes_about_twice_the_time() -> None:
    slow = {name: slow_input(pattern_of(name), uses(name)) for name in FOREIGN}

    assert not {name: text for name, text in slow.items() if text is not None}


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"(a+)+$", "match"),
        (r"x(?:a|a)*$", "match"),
        (r"\s+$", "search"),
        (r'"((?:[^"\\]|\\.)*)"|[\[\]{}]', "finditer"),
        (r"^(.*) - at `\$(.*)`$", "match"),
        (r"[a-z][a-z0-9+.-]*://\S+", "sub"),
        (r"'(?:[^'\\]|\\.)*'", "sub"),
        (r"\{(\w+)(?::[^}]*)?\}", "sub"),
        (r"a[^b]*[^b]*c", "fullmatch"),
    ],
)
def test_an_expression_that_is_not_linear_is_found(pattern: str, method: str) -> None:
    [site] = sites_of(f"import re\n_P = re.compile({pattern!r})\n_P.{method}(text)\n", "m").values()

    assert slow_input(re.compile(pattern), _uses(site)) is not None


@pytest.mark.parametrize(
    ("source", "name", "methods"),
    [
        ("import re as r\nP = r.compile('a')\ndef f(t):\n    return P.search(t)\n", "m:P", {"search"}),
        ("from re import match as m\ndef f(t):\n    return m('a', t)\n", "m:f", {"match"}),
        ("import re\nclass A:\n    def f(self, t):\n        self.p = re.compile(t)\n", "m:A.f.p", set()),
        ("import re\nF = map(re.search, a, b)\n", "m:F", {"search"}),
        ("class A:\n    x: Annotated[str, msgspec.Meta(pattern='a')]\n", "m:A.x", {"search"}),
    ],
)
def test_an_expression_is_found_however_it_is_written(source: str, name: str, methods: set[str]) -> None:
    [(found_name, site)] = sites_of(source, "m").items()

    assert (found_name, site.methods) == (name, methods)
