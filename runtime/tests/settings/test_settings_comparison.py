"""What differs between two loads: every key once, with its origin, and whether it can change while the process runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.plugin import Plugin
from dynamo_runtime.settings import Change, LoadedSettings, changes, config_schema, load_settings
from dynamo_runtime.settings.comparison import CONTENT
from dynamo_runtime.settings.model import LIVE_KEYS, SWITCHES
from hypothesis import given
from hypothesis import strategies as st

ConfigFile = Callable[..., Path]

#: What plugins take while they run.
LIVE = {"router": {"temperature"}, "workers.mock.engine": {"speedup_ratio"}}
KEY = "{{id: {0}, hash: 'sha256:{1}'}}"


def compare(old: LoadedSettings, new: LoadedSettings) -> list[Change]:
    return changes(old, new, lambda section: LIVE.get(section, set()))


def rewritten(config_file: ConfigFile, old: str, new: str, **env: str) -> list[Change]:
    """Return what `again` finds in a file that was written anew."""
    loaded = load_settings(config_file(old), env=env)
    config_file(new)
    return compare(loaded, loaded.again())


def test_moved_lines_are_no_change(config_file: ConfigFile) -> None:
    assert rewritten(config_file, "log: {level: info}\n", "\n\nrouter: {use: round-robin}\nlog:\n  level: info\n") == []


def test_a_change_has_its_key_both_values_and_the_line_of_the_new_one(config_file: ConfigFile) -> None:
    found = rewritten(config_file, "log: {level: info}\n", "# More.\nlog:\n  level: debug\n")

    assert found == [Change("log.level", "info", "debug", "config.yaml:3", live=True)]


def test_a_removed_key_returns_to_its_default(config_file: ConfigFile) -> None:
    found = rewritten(config_file, "log: {level: debug}\nrouter: {use: kv, temperature: 1}\n", "router: {use: kv}\n")

    assert found == [
        Change("log.level", "debug", "info", "default", live=True),
        Change("router.temperature", 1, None, "default", live=True),
    ]


def test_a_reload_reads_only_the_file_and_its_references(config_file: ConfigFile) -> None:
    env = {"DYN_LOG": "error"}
    loaded = load_settings(config_file("log: {level: info}\n"), env=env, sets=["router.temperature=2"])
    env["DYN_LOG"] = "debug"
    config_file("log: {level: warn}\nrouter: {temperature: 3}\n")

    assert compare(loaded, loaded.again()) == []


def test_a_secret_is_read_again_and_neither_of_its_values_shown(config_file: ConfigFile) -> None:
    config_file("first-secret-token", name="token")
    loaded = load_settings(config_file("admin: {port: 1, token: '${file:token}'}\n"), env={})
    config_file("other-secret-token", name="token")

    again = loaded.again()

    assert compare(loaded, again) == [Change("admin.token", "***", "***", "config.yaml:1", live=True)]
    assert again.settings.admin.token == "other-secret-token"


def test_the_files_are_the_config_the_secrets_and_the_certificates(config_file: ConfigFile) -> None:
    config_file("16 characters or more", name="token")
    path = config_file("admin: {token: '${file:token}'}\nfrontend: {tls: {cert: a.pem}}\n")

    assert load_settings(env={"DYN_CONFIG": str(path)}).files == {path, Path("token"), Path("a.pem")}


def test_a_certificate_counts_as_changed_if_its_file_holds_another(config_file: ConfigFile) -> None:
    config_file("one", name="a.pem")
    loaded = load_settings(config_file("frontend: {tls: {cert: a.pem}}\n"), env={})
    config_file("other", name="a.pem")

    again = loaded.again()

    assert compare(loaded, again) == [
        Change("frontend.tls.cert", "a.pem", f"a.pem{CONTENT}", "config.yaml:1", live=True)
    ]
    assert loaded.fingerprint() != again.fingerprint()


def test_keys_are_compared_by_their_ids(config_file: ConfigFile) -> None:
    a, b, c = (KEY.format(name, letter * 64) for name, letter in (("a", "1"), ("b", "2"), ("c", "3")))
    found = rewritten(config_file, f"auth: {{keys: [{a}, {b}]}}\n", f"auth: {{keys: [{c}, {b}]}}\n")

    assert [(change.key, change.live) for change in found] == [("auth.keys.c", True), ("auth.keys.a", True)]
    assert found[0].old is None
    assert found[0].new["id"] == "c"
    assert found[1].new is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("auth: {keys: []}", f"auth: {{keys: [{KEY.format('a', '1' * 64)}]}}"),
        ("admin: {token: 0123456789abcdef}", "admin: {}"),
        ("frontend: {tls: {}}", "frontend: {tls: {cert: a.pem}}"),
    ],
)
def test_a_guard_or_tls_is_never_switched_on_or_off(config_file: ConfigFile, old: str, new: str) -> None:
    for before, after in ((old, new), (new, old)):
        assert [change.live for change in rewritten(config_file, before, after)] == [False]


@pytest.mark.parametrize(
    ("old", "new", "live"),
    [
        ("router: {use: kv, temperature: 1}", "router: {use: kv, temperature: 2}", [True]),
        ("router: {use: kv, seed: 1}", "router: {use: kv, seed: 2}", [False]),
        ("router: {use: kv}", "router: {use: round-robin}", [False]),
        ("admission: {use: x}", "admission: {use: x, active_prefill_tokens_threshold: 5}", [True]),
        ("admission: {}", "admission: {models: {m.1: {active_prefill_tokens_threshold: 5}}}", [True]),
        ("namespace: a", "namespace: b", [False]),
        ("hooks: []", "hooks: [a]", [False]),
    ],
)
def test_live_changes_are_marked(config_file: ConfigFile, old: str, new: str, live: list[bool]) -> None:
    assert [change.live for change in rewritten(config_file, old, new)] == live


A, B = "{use: a, burst: 1}", "{use: b}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (f"[{A}, {B}]", f"[{{use: a, burst: 2}}, {B}]", {"admission.a.burst": True}),
        (f"[{A}, {B}]", f"[{A}, {{use: b, burst: 2}}]", {"admission.b.burst": False}),
        (f"[{A}, {B}]", f"[{A}, {{use: b, active_prefill_tokens_threshold: 2}}]",
         {"admission.b.active_prefill_tokens_threshold": True}),
        (f"[{A}, {B}]", f"[{B}, {A}]", {"admission": False}),
        (f"[{A}]", f"[{A}, {B}]", {"admission.b.use": False}),
        (f"[{A}, {B}]", f"[{A}, {{use: b, enabled: false}}]", {"admission.b.enabled": False}),
        (f"[{A}]", A, {"admission.a.use": False, "admission.use": False}),
    ],
)  # fmt: skip
def test_lists_of_plugins_are_compared_by_their_entries(
    config_file: ConfigFile, old: str, new: str, expected: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIVE, "admission.a", {"burst"})

    found = rewritten(config_file, f"admission: {old}\n", f"admission: {new}\n")

    assert {change.key: change.live for change in found}.items() >= expected.items()
    assert all(change.live for change in found) is all(expected.values())


def test_an_engine_has_live_keys_of_its_own(config_file: ConfigFile) -> None:
    text = "workers: {{mock: {{model: {{name: m}}, engine: {{use: mocker, speedup_ratio: {0}}}, replicas: {0}}}}}"
    found = rewritten(config_file, text.format(1), text.format(2))

    assert [(change.key, change.live) for change in found] == [
        ("workers.mock.engine.speedup_ratio", True),
        ("workers.mock.replicas", False),
    ]


@pytest.mark.parametrize("key", sorted(LIVE_KEYS | SWITCHES))
def test_every_live_key_of_core_exists(key: str) -> None:
    node: Any = (schema := config_schema({}))
    for part in key.split("."):
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        assert part in node["properties"], key
        node = node["properties"][part]


def test_a_plugin_cannot_declare_a_live_key_that_it_has_not() -> None:
    with pytest.raises(TypeError, match=r"Slip\.LIVE names weigth, which is no field"):

        class Slip(PluginConfig):
            LIVE: ClassVar[frozenset[str]] = frozenset({"weigth"})
            weight: int = 1


def test_a_plugin_with_live_keys_must_take_them() -> None:
    class Live(PluginConfig):
        LIVE: ClassVar[frozenset[str]] = frozenset({"weight"})
        weight: int = 1

    with pytest.raises(TypeError, match=r"Forgetful has no reconfigure, but Live\.LIVE names fields"):

        class Forgetful(Plugin):
            Config = Live


_VALUES = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.text("ab", max_size=2))
_OPTIONS = st.recursive(
    _VALUES, lambda below: st.dictionaries(st.sampled_from(["a", "b", "c"]), below, max_size=3), max_leaves=6
)


@given(st.dictionaries(st.sampled_from(["x", "y", "z"]), _OPTIONS), st.dictionaries(st.just("x"), _OPTIONS))
def test_changes_are_listed_exactly_for_differing_values(one: dict[str, Any], other: dict[str, Any]) -> None:
    def loaded(options: dict[str, Any]) -> LoadedSettings:
        return load_settings(
            env={}, flags={}, sets=[f"router.{key}={json.dumps(value)}" for key, value in options.items()]
        )

    before, after = loaded(one), loaded(other)
    found = compare(before, after)

    assert bool(found) == (repr(before.dump()) != repr(after.dump()))
    assert len({change.key for change in found}) == len(found)
    assert {change.key for change in compare(after, before)} == {change.key for change in found}
    for change in found:
        for value, loads in ((change.old, before), (change.new, after)):
            # Keys stand where the other has a value: they have rows of their own.
            assert value == loads.shown(change.key) or (value is None and isinstance(loads.shown(change.key), dict))
