"""A section that is a list of plugins: entries by name, in every layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.errors import ConfigError
from dynamo_runtime.settings import LoadedSettings, PluginEntry, config_schema, load_settings, view_settings
from dynamo_runtime.settings.entries import assign_section_keys, by_entry_name
from dynamo_runtime.settings.known_keys import shape_of
from dynamo_runtime.settings.layers import check, fill, merge
from dynamo_runtime.settings.tree import DEFAULT, Table, from_plain, to_plain
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

ConfigFile = Callable[..., Path]

CHAIN = """
admission:
  - use: rate-limit
    requests_per_minute: 60
  - use: fair-queue
    max_wait: 5
    active_decode_blocks_threshold: 0.8
profiles:
  slow:
    admission:
      - {use: token-capacity}
      - {use: fair-queue, max_wait: 50}
  alone:
    admission: [{use: rate-limit, enabled: false}]
"""
MAPPING = """
admission:
  use: fair-queue
  max_wait: 5
"""


def chain(loaded: LoadedSettings) -> list[tuple[str, str]]:
    return [(path, section.use) for path, section in loaded.settings.admissions.items()]


def options(loaded: LoadedSettings) -> dict[str, dict[str, Any]]:
    return {path: section.options for path, section in loaded.settings.admissions.items()}


def refusal(path: Path | None = None, **layers: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(path, env=layers.pop("env", {}), **layers)
    return str(caught.value)


def test_entries_are_asked_in_the_order_of_the_file(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file(CHAIN), env={})

    assert chain(loaded) == [("admission.rate-limit", "rate-limit"), ("admission.fair-queue", "fair-queue")]
    assert options(loaded)["admission.rate-limit"] == {"requests_per_minute": 60}
    assert loaded.settings.thresholds.active_decode_blocks_threshold == 0.8


def test_every_key_of_an_entry_has_its_own_origin(config_file: ConfigFile) -> None:
    loaded = load_settings(
        config_file(CHAIN), profile="slow", env={}, sets=["admission.rate-limit.requests_per_minute=7"]
    )

    assert loaded.origin("admission.rate-limit.use") == "config.yaml:2"
    assert (
        loaded.origin("admission.rate-limit.requests_per_minute") == "--set admission.rate-limit.requests_per_minute=7"
    )
    assert loaded.origin("admission.fair-queue.max_wait") == "profile slow (config.yaml:11)"
    assert loaded.origin("admission.fair-queue.active_decode_blocks_threshold") == "config.yaml:6"


def test_toml_entries_have_the_lines_of_their_keys(config_file: ConfigFile) -> None:
    text = '[[admission]]\nuse = "a"\nx = 1\n\n[[admission]]\nuse = "b"\nx = 2\n[admission.deep]\ny = 3\n'
    loaded = load_settings(config_file(text, "config.toml"), env={})

    assert options(loaded) == {"admission.a": {"x": 1}, "admission.b": {"x": 2, "deep": {"y": 3}}}
    keys = ("a.x", "b.use", "b.x", "b.deep.y")
    assert [loaded.origin(f"admission.{key}") for key in keys] == [f"config.toml:{line}" for line in (3, 6, 7, 9)]


OVER = "profiles: {one: {admission: {use: b, x: 1}}, other: {admission: {use: a, x: 2}}}"
RATE, FAIR = {"use": "rate-limit", "requests_per_minute": 60}, {"use": "fair-queue", "max_wait": 5}


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        # Entries of a profile keep the place they have in the file, and new ones come after.
        (
            CHAIN,
            {"profile": "slow"},
            {"rate-limit": RATE, "fair-queue": FAIR | {"max_wait": 50}, "token-capacity": {"use": "token-capacity"}},
        ),
        # A layer takes an entry out.
        (CHAIN, {"profile": "alone"}, {"fair-queue": FAIR}),
        # An entry that changes its plugin loses the keys of the other, and keeps its name.
        (CHAIN, {"sets": ["admission.rate-limit.use=other"]}, {"rate-limit": {"use": "other"}, "fair-queue": FAIR}),
        # Two of a kind have names.
        (
            "admission: [{use: a, name: by-key, n: 1}, {use: a, name: by-model, n: 2}]",
            {"sets": ["admission.by-model.n=3"]},
            {"by-key": {"use": "a", "n": 1}, "by-model": {"use": "a", "n": 3}},
        ),
        # A list over a mapping adds to it, and a mapping over a list is the entry of its plugin.
        (
            MAPPING + "profiles: {more: {admission: [{use: b}, {use: fair-queue, max_wait: 6}]}}",
            {"profile": "more"},
            {"fair-queue": FAIR | {"max_wait": 6}, "b": {"use": "b"}},
        ),
        ("admission: [{use: a}]\n" + OVER, {"profile": "one"}, {"a": {"use": "a"}, "b": {"use": "b", "x": 1}}),
        ("admission: [{use: a}]\n" + OVER, {"profile": "other"}, {"a": {"use": "a", "x": 2}}),
        # So is a list from a variable.
        (
            CHAIN,
            {"env": {"DYN_ADMISSION": '[{"use": "fair-queue", "max_wait": 1}]'}},
            {"rate-limit": RATE, "fair-queue": FAIR | {"max_wait": 1}},
        ),
        (
            CHAIN,
            {"sets": ["admission.late.use=token-capacity"]},
            {"rate-limit": RATE, "fair-queue": FAIR, "late": {"use": "token-capacity"}},
        ),
        # The flag adds an entry, enables one, or takes all out.
        (
            CHAIN,
            {"flags": {"--admission-control": "token-capacity"}},
            {"rate-limit": RATE, "fair-queue": FAIR, "token-capacity": {"use": "token-capacity"}},
        ),
        (CHAIN, {"flags": {"--admission-control": "fair-queue"}}, {"rate-limit": RATE, "fair-queue": FAIR}),
        (
            CHAIN,
            {"flags": {"--admission-control": "rate-limit"}, "profile": "alone"},
            {"rate-limit": RATE, "fair-queue": FAIR},
        ),
        (CHAIN, {"flags": {"--admission-control": "none"}}, {}),
    ],
)
def test_layers_make_these_entries_in_this_order(
    config_file: ConfigFile, text: str, layers: dict[str, Any], expected: dict[str, dict[str, Any]]
) -> None:
    loaded = load_settings(config_file(text), **({"env": {}} | layers))

    found = {path: {"use": use} | options(loaded)[path] for path, use in chain(loaded)}
    assert list(found.items()) == [(f"admission.{name}", keys) for name, keys in expected.items()]


@pytest.mark.parametrize("text", [CHAIN, MAPPING])
@pytest.mark.parametrize(
    ("env", "sets"),
    [({}, ["admission.fair-queue.max_wait=9"]), ({"DYN_ADMISSION__FAIR_QUEUE__MAX_WAIT": "9"}, [])],
)
def test_a_key_is_set_by_the_name_of_the_entry_in_a_list_and_in_a_mapping(
    config_file: ConfigFile, text: str, env: dict[str, str], sets: list[str]
) -> None:
    loaded = load_settings(config_file(text), env=env, sets=sets)

    (own,) = (own for path, own in options(loaded).items() if "rate-limit" not in path)
    assert own == {"max_wait": 9}


def test_a_flag_and_a_key_of_its_entry_go_together_without_a_file() -> None:
    flags = {"--admission-control": "rate-limit"}
    loaded = load_settings(env={}, flags=flags, sets=["admission.rate-limit.requests_per_minute=5"])
    by_env = load_settings(
        env={"DYN_ADMISSION_CONTROL": "rate-limit", "DYN_ADMISSION__RATE_LIMIT__REQUESTS_PER_MINUTE": "5"}
    )

    assert options(loaded) == options(by_env) == {"admission": {"requests_per_minute": 5}}


def test_the_flag_picks_an_entry_by_its_plugin_where_it_has_another_name(config_file: ConfigFile) -> None:
    one = config_file("admission: [{use: a, name: x, enabled: false}]", "one.yaml")
    two = config_file("admission: [{use: a, name: x}, {use: a, name: y}]", "two.yaml")
    flags = {"--admission-control": "a"}

    assert chain(load_settings(one, env={}, flags=flags)) == [("admission.x", "a")]
    assert refusal(two, flags=flags) == (
        "flag --admission-control: admission.use: the entries 'x' and 'y' use 'a': say which one is meant, such as "
        "--set admission.x.enabled=true"
    )


def test_thresholds_of_a_flag_go_where_the_thresholds_are(config_file: ConfigFile) -> None:
    path = config_file(CHAIN)
    flags = {"--admission-control": "token-capacity", "--active-decode-blocks-threshold": 0.5}
    loaded = load_settings(path, env={"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "7"}, flags=flags)

    assert loaded.origin("admission.fair-queue.active_decode_blocks_threshold") == (
        "flag --active-decode-blocks-threshold"
    )
    thresholds = loaded.settings.thresholds
    assert (thresholds.active_decode_blocks_threshold, thresholds.active_prefill_tokens_threshold) == (0.5, 7)


def test_thresholds_without_an_entry_that_has_any_are_the_first_ones(config_file: ConfigFile) -> None:
    path = config_file("admission: [{use: off, enabled: false}, {use: a}, {use: b}]", "a.yaml")
    env = {"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "7"}
    loaded = load_settings(path, env=env, sets=["admission.models={m: {active_prefill_tokens_threshold: 3}}"])

    assert loaded.settings.thresholds.active_prefill_tokens_threshold == 7
    assert loaded.settings.thresholds.models["m"].model_dump(exclude_unset=True) == {
        "active_prefill_tokens_threshold": 3
    }
    assert loaded.origin("admission.a.active_prefill_tokens_threshold") == (
        "environment DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD"
    )


@pytest.mark.parametrize("form", ["{thresholds}", "[{thresholds}]"])
def test_a_model_sets_some_thresholds_and_has_the_others_of_all_models(config_file: ConfigFile, form: str) -> None:
    one = "{use: a, active_decode_blocks_threshold: 0.5, models: {m: {active_prefill_tokens_threshold: 3}}}"
    loaded = load_settings(config_file(f"admission: {form.format(thresholds=one)}"), env={})

    section = loaded.settings.thresholds
    assert section.active_decode_blocks_threshold == 0.5
    assert section.models["m"].model_dump(exclude_unset=True) == {"active_prefill_tokens_threshold": 3}


def test_an_empty_list_admits_everything_and_keeps_thresholds(config_file: ConfigFile) -> None:
    path = config_file("admission: []")

    assert chain(load_settings(path, env={})) == []
    kept = load_settings(path, env={}, flags={"--active-decode-blocks-threshold": 0.5})
    assert (chain(kept), kept.settings.thresholds.active_decode_blocks_threshold) == ([], 0.5)


def test_a_dumped_list_equals_the_written_one_and_loads_again(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file(CHAIN), profile="slow", env={})

    shown = loaded.dump()["admission"]
    assert shown == [
        {"use": "rate-limit", "requests_per_minute": 60},
        {"use": "fair-queue", "max_wait": 50, "active_decode_blocks_threshold": 0.8},
        {"use": "token-capacity"},
    ]
    again = load_settings(config_file(json.dumps({"admission": shown}), "again.yaml"), env={})
    assert options(again) == options(loaded)
    assert [row[0] for row in loaded.rows() if row[0].startswith("admission")] == [
        "admission.rate-limit.use",
        "admission.rate-limit.requests_per_minute",
        "admission.fair-queue.use",
        "admission.fair-queue.max_wait",
        "admission.fair-queue.active_decode_blocks_threshold",
        "admission.token-capacity.use",
    ]


def test_secrets_of_an_entry_are_hidden_and_names_are_none(config_file: ConfigFile) -> None:
    text = """
    admission:
      - {use: a, name: api-key, limit: seven, redis: {url: "redis://u:p@h", password: "${env:PASSWORD}"}}
    """
    path = config_file(text)
    loaded = load_settings(path, env={"PASSWORD": "hunter2"})

    assert loaded.dump()["admission"][0] | {"use": "a"} == {
        "use": "a",
        "name": "api-key",
        "limit": "seven",
        "redis": {"url": "redis://***@h", "password": "***"},
    }
    assert options(loaded)["admission.api-key"]["redis"]["password"] == "hunter2"
    assert "hunter2" not in repr(loaded.settings)
    assert "not set" in str(view_settings(path, env={}).dump())


class Limits(PluginConfig):
    per_minute: int
    burst: int = 1


def test_the_keys_of_an_entry_are_checked_by_its_plugin(config_file: ConfigFile) -> None:
    path = config_file("admission:\n  - use: a\n    name: x\n    per_minute: 3\n  - use: b\n    burts: 3\n  - use: c\n")
    loaded = load_settings(path, env={})

    assert loaded.plugin_config("admission.x", Limits).per_minute == 3
    with pytest.raises(ConfigError) as unknown:
        loaded.plugin_config("admission.b", Limits)
    assert str(unknown.value) == (
        "config.yaml:6: admission.b.burts: unknown key of admission 'b'; did you mean 'burst'?"
    )
    with pytest.raises(ConfigError) as missing:
        loaded.plugin_config("admission.c", Limits)
    assert str(missing.value) == "config.yaml:7: admission.c.per_minute: is missing; admission 'c' needs it"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "admission:\n  - use: a\n  - use: a\n",
            "config.yaml:3: admission[1]: two entries are called 'a', the first at config.yaml:2: give one of them a "
            "`name` of its own",
        ),
        (
            "admission:\n  - use: a\n    active_decode_blocks_threshold: 1\n  - use: b\n    models: {}\n",
            "config.yaml:5: admission.b.models: the entry 'a' has keys of this kind too, at config.yaml:3: "
            "write them in one entry only",
        ),
        (
            "admission: [a]",
            "config.yaml:1: admission[0]: expected a mapping of settings such as {use: …}, got a single value",
        ),
        (
            "admission: [{x: 1}]",
            "config.yaml:1: admission[0]: an entry needs `use`, or the `name` of an entry that a lower layer has",
        ),
        ("admission: [{name: x}]", "config.yaml:1: admission.x.use: is missing; it has no default"),
        (
            "admission: [{use: ./file.py:Class}]",
            "config.yaml:1: admission[0]: './file.py:Class' cannot be the name of an entry: give it a `name` of "
            "letters, digits, '_' and '-'",
        ),
        (
            "admission: [{use: models}]",
            "config.yaml:1: admission[0]: an entry cannot be called 'models', a key of the section: give it "
            "another `name`",
        ),
        (
            "admission: [{use: none}]",
            "config.yaml:1: admission.none.use: `none` is no plugin that could be asked: leave the entry out, or write "
            "`enabled: false`",
        ),
        ("admission: [{use: a, enabled: 7}]", "config.yaml:1: admission.a.enabled: expected true or false, got 7"),
        (
            "admission: [{use: a, models: {m: {treshold: 1}}}]",
            "config.yaml:1: unknown key 'treshold' in admission.a.models.m; known: active_decode_blocks_threshold, "
            "active_prefill_tokens_threshold, active_prefill_tokens_threshold_frac",
        ),
    ],
)
def test_list_errors_have_place_and_remedy(config_file: ConfigFile, text: str, words: str) -> None:
    assert refusal(config_file(text)) == words


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "admission.fair-quue.max_wait=1",
            "--set admission.fair-quue.max_wait=1: admission.fair-quue: no entry of the list is called 'fair-quue'; "
            "did you mean 'fair-queue'?",
        ),
        (
            "admission.max_wait=1",
            "--set admission.max_wait=1: admission is a list here: say which entry is meant, such as "
            "admission.rate-limit.max_wait",
        ),
        (
            "admission=fair-queue",
            "--set admission=fair-queue: expected a mapping of settings such as {use: …}, got a single value",
        ),
    ],
)
def test_a_key_of_no_entry_is_refused_with_suggestions(config_file: ConfigFile, argument: str, words: str) -> None:
    assert refusal(config_file(CHAIN), sets=[argument]) == words


def follow(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][node["$ref"].rpartition("/")[2]]  # type: ignore[no-any-return]


def test_the_schema_has_both_forms_and_the_keys_of_each_plugin_of_the_list() -> None:
    schema = config_schema({"admission.*.rate-limit": Limits})

    section = follow(schema, schema["properties"]["admission"])
    assert section["type"] == ["object", "array"]
    entry = follow(schema, section["items"])
    (rule,) = entry["allOf"]
    assert rule["if"] == {"properties": {"use": {"const": "rate-limit"}}, "required": ["use"]}
    own = follow(schema, rule["then"])
    assert {"use", "name", "enabled", "per_minute", "burst", "models"} <= set(own["properties"])
    assert own["required"] == ["use", "per_minute"]
    assert own["additionalProperties"] is False
    partial = schema["$defs"][f"Partial.{section['items']['$ref'].rpartition('/')[2]}"]
    assert partial["allOf"][0]["if"]["required"] == ["use"], "an entry of a profile may leave out `use`"
    assert "required" not in follow(schema, partial["allOf"][0]["then"])


class Entry(PluginEntry):
    role: str = "frontend"


class OnlyAList(BaseModel):
    """A section that is a list and nothing else."""

    extensions: tuple[Entry, ...] = ()


def of_a_list_only(*layers: dict[str, Any]) -> OnlyAList:
    shape = shape_of(OnlyAList)
    tree = Table(DEFAULT)
    for layer in layers:
        upper = from_plain(layer, "here")
        assert isinstance(upper, Table)
        check(upper, shape)
        tree = merge(tree, by_entry_name(upper, tree, shape, merge), shape)
    return OnlyAList.model_validate(to_plain(fill(assign_section_keys(tree, shape), shape)))


def test_a_section_can_be_a_list_and_nothing_else() -> None:
    merged = of_a_list_only(
        {"extensions": [{"use": "stats", "role": "worker", "x": 1}, {"use": "page"}]},
        {"extensions": {"stats": {"x": 2}, "late": {"use": "page"}}},
        {"extensions": None},
    )

    entries = [(entry.key, entry.use, entry.role, entry.options) for entry in merged.extensions]
    assert entries == [
        ("stats", "stats", "worker", {"x": 2}),
        ("page", "page", "frontend", {}),
        ("late", "page", "frontend", {}),
    ]
    assert of_a_list_only({}).extensions == of_a_list_only({"extensions": None}).extensions == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"use": "stats"}, "here: extensions.use: extensions is a list: write [{use: …}], or extensions.NAME.use"),
        ("stats", "here: extensions: expected a list such as [{use: …}], got a single value"),
        ({"stats": {"x": 1}}, "here: extensions.stats: no entry of the list is called 'stats'"),
    ],
)
def test_a_list_is_not_taken_for_one_plugin(value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of_a_list_only({"extensions": value})

    assert str(caught.value) == words


NAMES = st.sampled_from(["a", "b", "c", "d"])
ENTRY = st.fixed_dictionaries({"use": NAMES}, optional={"x": st.integers(0, 9), "y": st.integers(0, 9)})
LISTS = st.lists(ENTRY, max_size=4, unique_by=lambda entry: entry["use"])


@given(st.lists(LISTS, min_size=1, max_size=4))
def test_merged_lists_have_each_entry_once_with_its_top_values(
    tmp_path_factory: pytest.TempPathFactory, layers: list[list[dict[str, Any]]]
) -> None:
    lowest, *others = layers
    path = tmp_path_factory.getbasetemp() / "layers.yaml"
    path.write_text(json.dumps({"admission": lowest, "profiles": {"p": {"admission": others[0] if others else None}}}))

    loaded = load_settings(path, profile="p", env={}, sets=[f"admission={json.dumps(layer)}" for layer in others[1:]])

    # --set arguments are one layer, of which the last list counts.
    laid = [*layers[:2], *([layers[-1]] if len(layers) > 2 else [])]
    expected: dict[str, dict[str, Any]] = {}
    for layer in laid:
        for entry in layer:
            expected.setdefault(f"admission.{entry['use']}", {}).update(entry)
    assert {path: {"use": section.use, **section.options} for path, section in loaded.settings.admissions.items()} == (
        expected
    )
    assert [path for path, _ in chain(loaded)] == list(expected)
