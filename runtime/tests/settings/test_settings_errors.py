"""Every way to get the configuration wrong, and the one line that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.errors import ConfigError
from dynamo_runtime.settings import load_settings

ConfigFile = Callable[..., Path]


def error_of(
    path: Path | None = None,
    *,
    profile: str | None = None,
    env: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(path, profile=profile, env=env or {}, sets=sets, flags=flags)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return message


WORKER = """
workers:
  mock:
    model: {name: m}
    engine: {use: mocker}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("namespace: x\nrooter: {use: kv}", "config.yaml:2: unknown key 'rooter'; did you mean 'router'?"),
        ("profile: {}", "config.yaml:1: unknown key 'profile'; did you mean 'profiles'?"),
        ("log:\n  levle: info", "config.yaml:2: unknown key 'levle' in log; did you mean 'level'?"),
        (
            WORKER + "    replica: 2",
            "config.yaml:5: unknown key 'replica' in workers.mock; did you mean 'replicas'?",
        ),
        (WORKER + "    replicas: two", "config.yaml:5: workers.mock.replicas: expected an integer, got 'two'"),
        (WORKER + "    replicas: 0", "config.yaml:5: workers.mock.replicas: must be at least 1, got 0"),
        (WORKER + "    replicas: yes", "config.yaml:5: workers.mock.replicas: expected an integer, got true"),
        (WORKER + "    replicas: 1.5", "config.yaml:5: workers.mock.replicas: expected an integer, got 1.5"),
        (
            WORKER + "    request_queue_limit: 1",
            "config.yaml:5: workers.mock.request_queue_limit: must be at least 2, got 1",
        ),
        (WORKER + "    drain_timeout: 0", "config.yaml:5: workers.mock.drain_timeout: must be more than 0, got 0"),
        (
            WORKER + "    disaggregation_mode: both",
            "config.yaml:5: workers.mock.disaggregation_mode: unknown disaggregation mode 'both' (expected one of: "
            "agg, prefill, decode)",
        ),
        (
            WORKER + "    endpoint_types: [chat, images]",
            "config.yaml:5: workers.mock.endpoint_types[1]: expected 'chat', 'completions', 'embeddings', 'score' or "
            "'rerank', got 'images'",
        ),
        ("client: {total_timeout: .inf}", "config.yaml:1: client.total_timeout: expected a finite number, got inf"),
        ("client: {keep_alive: true}", "config.yaml:1: client.keep_alive: expected a number, got true"),
        ("frontend: {port: 65536}", "config.yaml:1: frontend.port: must be at most 65535, got 65536"),
        ("frontend: {port: null}", "config.yaml:1: frontend.port: expected an integer, got null"),
        ("frontend: {host: ''}", "config.yaml:1: frontend.host: must not be empty"),
        (
            "frontend: 8000",
            "config.yaml:1: frontend: expected a mapping of settings such as {use: …}, got a single value",
        ),
        ("log: [info]", "config.yaml:1: log: expected a mapping of settings, got a single value"),
        ("namespace: {a: b}", "config.yaml:1: namespace: expected a string, got a mapping"),
        ("namespace: a.b", "config.yaml:1: namespace: must match ^[A-Za-z0-9_-]+$, got 'a.b'"),
        ("hooks: audit", "config.yaml:1: hooks: expected a list, got 'audit'"),
        ("log: {level: loud}", "config.yaml:1: log.level: expected 'debug', 'info', 'warning' or 'error', got 'loud'"),
        (WORKER + "    endpoint_types: []", "config.yaml:5: workers.mock.endpoint_types: must not be empty"),
        ("log: {json: maybe}", "config.yaml:1: log.json: expected true or false, got 'maybe'"),
        (
            "workers: {My-GPU: {model: {name: m}, engine: {use: vllm}}}",
            "config.yaml:1: workers.My-GPU: a worker's name may hold only a-z, 0-9 and _",
        ),
        (
            'workers:\n  mock:\n    model: {name: "m\\u202egnp"}\n    engine: {use: e}',
            "config.yaml:3: workers.mock.model.name: has characters that do not show: m\\u202egnp",
        ),
        (
            'workers:\n  mock:\n    model: {name: "\\e[2J"}\n    engine: {use: e}',
            "config.yaml:3: workers.mock.model.name: has characters that do not show: \\x1b[2J",
        ),
        (
            f"workers:\n  mock:\n    model: {{name: {'x' * 60_000}}}\n    engine: {{use: e}}",
            "config.yaml:3: workers.mock.model.name: has 60000 characters, more than 256: " + "x" * 20 + "…",
        ),
        (
            "workers:\n  mock:\n    model: {name: '  '}\n    engine: {use: e}",
            "config.yaml:3: workers.mock.model.name: is blank",
        ),
        ("workers:\n  mock:", "config.yaml:2: workers.mock.model: is missing; it has no default"),
        (
            "workers:\n  mock:\n    model: {}\n    engine: {use: e}",
            "config.yaml:3: workers.mock.model.name: is missing; it has no default",
        ),
        ("a: [", "config.yaml:1: is not valid YAML: expected the node content, but found '<stream end>'"),
        ("- a", "config.yaml:1: expected a mapping of settings, such as 'router: {use: round-robin}'"),
        ("log: {}\nlog: {}", "config.yaml:2: key 'log' is given twice; the first is in line 1"),
        (
            "a: &a {log: {}}\nb: &b {log: {}}\nc:\n  <<: *a\n  <<: *b",
            "config.yaml:5: key '<<' is given twice; the first is in line 4",
        ),
        ("hooks:\n- {a: 1, a: 2}", "config.yaml:2: key 'a' is given twice; the first is in line 2"),
        ("? [a]\n: b", "config.yaml:1: a key must be a plain word"),
        ("router: &a\n  use: x\n  b: *a", "config.yaml:1: an alias refers to itself"),
        ("profiles: [a]", "config.yaml:1: profiles: expected a mapping of profiles by name"),
        ("profiles: {p: 1}", "config.yaml:1: profiles.p: expected a mapping of settings"),
        (
            "profiles:\n  p: {rooter: {}}",
            "profile p (config.yaml:2): unknown key 'rooter'; did you mean 'router'?",
        ),
        ("profiles: {p: {profiles: {}}}", "profile p (config.yaml:1): a profile cannot hold profiles"),
    ],
)
def test_a_yaml_error_has_its_line(config_file: ConfigFile, text: str, message: str) -> None:
    path = config_file(text)

    assert error_of(path) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("namespace = 'x'\n[rooter]\nuse = 'kv'", "config.toml:2: unknown key 'rooter'; did you mean 'router'?"),
        ("[frontend]\nport = 'x'", "config.toml:2: frontend.port: expected an integer, got 'x'"),
        ("a = 1\na = 2\nb = 3", "config.toml:2: key 'a' is given twice; the first is in line 1"),
        ("a = 1\na = 2", "config.toml:2: key 'a' is given twice; the first is in line 1"),
        (
            "[log]\njson = true\n\n'json' = false",
            "config.toml:4: key 'log.json' is given twice; the first is in line 2",
        ),
        ("[log]\n[frontend]\n[log]", "config.toml:3: key 'log' is given twice; the first is in line 1"),
        (
            "log.level = 'info'\nlog . level = 'debug'",
            "config.toml:2: key 'log.level' is given twice; the first is in line 1",
        ),
        ("[[a]]\nb = 1\n[[a]]\nb = 1\nb = 2", "config.toml:5: key 'a.b' is given twice; the first is in line 4"),
        ('a = """\nb = 1\n"""\nb = 1\nb = 2', "config.toml:5: key 'b' is given twice; the first is in line 4"),
        ("a = 1\n[a]\nb = 2", "config.toml:2: key 'a' is given twice; the first is in line 1"),
        ("log = {json = true, json = false}", "config.toml:1: is not valid TOML: Duplicate inline table key 'json'"),
        ("[x]\ny.z = 1\n[x.y]\nz = 2", "config.toml:3: key 'x.y' is given twice; the first is in line 2"),
        ("a = 1\na =", "config.toml: is not valid TOML: Invalid value"),
    ],
)
def test_a_wrong_toml_key_is_reported_with_its_line(config_file: ConfigFile, text: str, message: str) -> None:
    path = config_file(text, "config.toml")

    assert error_of(path) == message


def test_a_file_that_cannot_be_read_is_named(config_file: ConfigFile, tmp_path: Path) -> None:
    binary = config_file("")
    binary.write_bytes(b"\xff\xfe")
    control = config_file("", "control.yaml")
    control.write_bytes(b"a: \x01")

    assert error_of(Path("none.yaml")) == "none.yaml: cannot be read: No such file or directory"
    assert error_of(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    assert error_of(binary) == "config.yaml: is not a UTF-8 text file"
    assert error_of(control) == "control.yaml: is not valid YAML: it holds characters that are not allowed"
    assert error_of(config_file("[" * 1000, "deep.yaml")) == "deep.yaml: is nested too deeply"


def test_a_missing_profile_has_a_suggestion(config_file: ConfigFile) -> None:
    path = config_file("profiles: {production: {}, laptop: {}}")
    without = config_file("namespace: x", "without.yaml")

    assert error_of(path, profile="prodction") == (
        "config.yaml: profile 'prodction' is not in the file; did you mean 'production'?"
    )
    assert error_of(path, profile="zzz") == "config.yaml: profile 'zzz' is not in the file; known: laptop, production"
    assert error_of(without, profile="zzz") == "without.yaml: profile 'zzz' is not in the file"
    assert error_of(profile="p") == "profile 'p': there is no config file to take it from; name one too"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DYN_TRANSPROT__USE", "tcp", "unknown setting; did you mean DYN_TRANSPORT__USE?"),
        ("DYN_TRANSPROT__SERVERS", "x", "unknown setting; did you mean DYN_TRANSPORT__SERVERS?"),
        ("DYN_HTTP_PROT", "1", "unknown setting; did you mean DYN_HTTP_PORT?"),
        ("DYN_WORKERS__MOCK__REPLICA", "1", "unknown setting; did you mean DYN_WORKERS__MOCK__REPLICAS?"),
        ("DYN_STREAM_VALIDATE", "1", "unknown setting; did you mean DYN_STREAM_VALIDATOR?"),
        ("DYN_TRANSPROT__USE", "", "unknown setting; did you mean DYN_TRANSPORT__USE?"),
        ("DYN_PROFILES__P__NAMESPACE", "x", "unknown setting; see docs/reference/configuration.md for the names"),
        ("DYN_NAMESPACE__", "x", "unknown setting; did you mean DYN_NAMESPACE?"),
        ("DYN_TRANSPORT____A", "x", "unknown setting; did you mean DYN_TRANSPORT__USE?"),
        ("DYN_XYZ", "1", "unknown setting; see docs/reference/configuration.md for the names"),
        ("DYN_FOO", "1", "unknown setting; see docs/reference/configuration.md for the names"),
        ("DYN_WORKERS__MOKC__REPLICAS", "2", "unknown worker 'mokc'; did you mean 'mock'?"),
        ("DYN_WORKERS__MOCK__REPLICAS", "two", "workers.mock.replicas: expected an integer, got 'two'"),
        ("DYN_LOG", "loud", "log.level: expected 'debug', 'info', 'warning' or 'error', got 'loud'"),
        ("DYN_HOOKS", "[a", "hooks: expected a list, got '[a'"),
        ("DYN_LOG", "{a: 1}", "log.level: expected 'debug', 'info', 'warning' or 'error', got '{a: 1}'"),
        (
            "DYN_TRANSPORT",
            "tcp",
            "transport: expected a mapping of settings such as {use: …}, got a single value",
        ),
        ("DYN_LOG__JSON", "{a: 1}", "log.json: expected true or false, got a mapping"),
        ("DYN_CLIENT", "{retry: 1}", "unknown key 'retry' in client; did you mean 'retries'?"),
    ],
)
def test_an_environment_error_names_the_variable(name: str, value: str, message: str) -> None:
    assert error_of(env={name: value, "PATH": "/bin"}) == f"environment {name}: {message}"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("transprot.use=tcp", "--set transprot.use=tcp: unknown key 'transprot'; did you mean 'transport'?"),
        (
            "workers.mock.replicas=two",
            "--set workers.mock.replicas=two: expected an integer, got 'two'",
        ),
        ("workers.mokc.replicas=2", "--set workers.mokc.replicas=2: unknown worker 'mokc'; did you mean 'mock'?"),
        (
            "workers={mock: {replicas: two}}",
            "--set workers={mock: {replicas: two}}: workers.mock.replicas: expected an integer, got 'two'",
        ),
        ("transport=tcp", "--set transport=tcp: expected a mapping of settings such as {use: …}, got a single value"),
        ("namespace", "--set namespace: expected KEY=VALUE, such as --set router.use=round-robin"),
        ("router..use=kv", "--set router..use: expected KEY=VALUE, such as --set router.use=round-robin"),
    ],
)
def test_a_set_error_names_the_argument(argument: str, message: str) -> None:
    assert error_of(sets=[argument]) == message


def test_a_flag_error_names_the_flag() -> None:
    assert error_of(flags={"--http-port": 70000}) == (
        "flag --http-port: frontend.port: must be at most 65535, got 70000"
    )
    assert error_of(flags={"--http-prot": 1}) == "flag --http-prot: unknown flag; did you mean --http-port?"


def test_a_flag_that_is_like_no_other_gets_no_suggestion() -> None:
    assert error_of(flags={"--zzz": 1}) == "flag --zzz: unknown flag; see docs/reference/configuration.md for the names"


def test_the_keys_of_core_are_suggested_in_a_section_of_a_plugin() -> None:
    class Plain(PluginConfig):
        chat_path: str = "/chat"

    with pytest.raises(ConfigError) as caught:
        load_settings(env={}, sets=["frontend.prot=1"]).plugin_config("frontend", Plain)
    with pytest.raises(ConfigError) as far:
        load_settings(env={}, sets=["frontend.zzz=1"]).plugin_config("frontend", Plain)

    assert str(caught.value) == "--set frontend.prot=1: unknown key of frontend 'openai'; did you mean 'port'?"
    assert str(far.value).endswith("; known: apis, chat_path, host, port, processes, response_store, tls, use")


def test_errors_caused_by_a_variable_name_it(config_file: ConfigFile) -> None:
    path = config_file("profiles: {laptop: {}}")

    assert error_of(env={"DYN_CONFIG": "none.yaml"}) == (
        "environment DYN_CONFIG: none.yaml: cannot be read: No such file or directory"
    )
    assert error_of(path, env={"DYN_PROFILE": "desk"}) == (
        "environment DYN_PROFILE: config.yaml: profile 'desk' is not in the file; known: laptop"
    )
    assert error_of(env={"DYN_PROFILE": "p"}) == (
        "environment DYN_PROFILE: profile 'p': there is no config file to take it from; name one too"
    )
    assert error_of(path, profile="desk", env={"DYN_PROFILE": "laptop"}).startswith("config.yaml: profile 'desk'")


def test_a_wrong_value_that_a_higher_layer_puts_right_is_no_error(config_file: ConfigFile) -> None:
    path = config_file("frontend: {port: wrong}")

    loaded = load_settings(path, env={"DYN_HTTP_PORT": "9000"})

    assert loaded.settings.frontend.port == 9000


def test_a_misspelled_key_is_reported_before_the_missing_one(config_file: ConfigFile) -> None:
    path = config_file("workers:\n  mock:\n    model:\n      nme: m\n    engine: {use: mocker}")

    assert error_of(path) == "config.yaml:4: unknown key 'nme' in workers.mock.model; did you mean 'name'?"


@pytest.mark.parametrize("name", ["Authorization", "cookie", "X-API-Key", "Proxy-Authorization"])
@pytest.mark.parametrize("line", ["session_header: {}", "forward_headers: [x-team, {}]"])
def test_a_header_that_holds_secrets_is_shown_to_no_plugin(config_file: ConfigFile, name: str, line: str) -> None:
    message = error_of(config_file("http:\n  " + line.format(name)))

    assert message.startswith(f"config.yaml:2: http.{line.partition(':')[0]}")
    assert f"`{name.lower()}` holds a secret of the client: let clients send what plugins may see" in message


@pytest.mark.parametrize("name", ["'x team'", "'x:team'", "'é'", "''"])
def test_an_invalid_header_name_is_refused(config_file: ConfigFile, name: str) -> None:
    assert "http.forward_headers" in error_of(config_file(f"http: {{forward_headers: [{name}]}}"))
