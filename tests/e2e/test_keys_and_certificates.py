"""A frontend as it is opened to a network: keys, the operators' token, TLS, a browser's page, all from the config."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from dynamo_http.auth import hash_of, new_key

KEY, TOKEN = new_key(), new_key()
PAGE = "https://chat.example.com"
BODY = {"model": "mock-model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
STREAMED = BODY | {"stream": True}


class Guarded:
    """A running server, and a client that takes its certificate."""

    def __init__(self, server: Any, trust: ssl.SSLContext) -> None:
        self.server = server
        self._trust = trust

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, bytes]:
        connection = http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=90, context=self._trust)
        try:
            data = None if body is None else json.dumps(body).encode()
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(
                "GET" if body is None else "POST", path, data, {"content-type": "application/json"} | given
            )
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, serve_for_module: Any) -> Guarded:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    folder: Path = tmp_path_factory.mktemp("guarded")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "tls.key", "-out", "tls.crt"],
        check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    config = f"""
frontend: {{use: openai, tls: {{cert: {folder}/tls.crt, key: {folder}/tls.key}}}}
admin: {{token: "${{env:OPERATORS}}"}}
auth: {{keys: [{{id: team, hash: "{hash_of(KEY)}"}}, {{id: other, env: OTHER_KEY, models: [another]}}]}}
http: {{cors: {{origins: ["{PAGE}"]}}}}
client: {{drain_grace: 0}}
workers: {{mock: {{model: {{name: mock-model}}, engine: {{use: mocker, speedup_ratio: 100}}, grace_period: 0}}}}
"""
    server = serve_for_module(config, env={"OPERATORS": TOKEN, "OTHER_KEY": "o" * 20})
    return Guarded(server, ssl.create_default_context(cafile=str(folder / "tls.crt")))


def test_a_key_is_needed_and_enough(guarded: Guarded) -> None:
    path = "/v1/chat/completions"

    assert guarded.ask(path, BODY, authorization=f"Bearer {KEY}")[0] == 200
    assert guarded.ask(path, BODY, x_api_key=KEY)[0] == 200
    assert guarded.ask(path, BODY, x_api_key="o" * 20)[0] == 404
    status, headers, body = guarded.ask(path, BODY)
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert json.loads(body)["error"]["type"] == "authentication_error"


def test_health_is_open_and_metrics_want_the_token(guarded: Guarded) -> None:
    for path in ("/health", "/live", "/ready"):
        assert guarded.ask(path)[0] == 200
    assert guarded.ask("/metrics")[0] == 401
    assert guarded.ask("/metrics", authorization=f"Bearer {KEY}")[0] == 401

    status, _, metrics = guarded.ask("/metrics", authorization=f"Bearer {TOKEN}")

    assert status == 200
    assert b'dynamo_frontend_unauthorized_requests_total{listener="admin",reason="missing"}' in metrics


def test_health_shows_hosts_and_instances_only_to_a_key_or_the_token(guarded: Guarded) -> None:
    whole = {name: guarded.ask("/health", authorization=f"Bearer {name}")[2] for name in (KEY, TOKEN, "wrong")}
    bare = json.loads(guarded.ask("/health")[2])

    assert bare == json.loads(whole["wrong"]) == {"status": "healthy", "endpoints": bare["endpoints"]}
    for key in (KEY, TOKEN):
        (instance,) = json.loads(whole[key])["instances"]
        assert instance["host"]
        assert instance["pid"]
        assert instance["instance_id"]


def test_a_page_of_a_named_origin_may_send_requests(guarded: Guarded) -> None:
    for path, body in (("/v1/models", None), ("/v1/chat/completions", BODY), ("/v1/chat/completions", STREAMED)):
        status, headers, _ = guarded.ask(path, body, authorization=f"Bearer {KEY}", origin=PAGE)

        assert (status, headers["Access-Control-Allow-Origin"]) == (200, PAGE)


def test_the_log_names_the_key_and_does_not_hold_it(guarded: Guarded) -> None:
    guarded.ask("/v1/chat/completions", BODY, authorization=f"Bearer {KEY}")

    assert guarded.ask("/health")[0] == 200
    assert guarded.server.until(lambda: "key_id=team" in guarded.server.log, 5)
    assert KEY not in guarded.server.log
    assert TOKEN not in guarded.server.log


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("frontend: {tls: {cert: no.pem}}", "config.yaml:1: frontend.tls.cert: no.pem cannot be read: No such file"),
        (
            f"auth: {{keys: [{{id: a, hash: '{hash_of(KEY)}'}}]}}",
            "config.yaml:1: auth.keys: keys guard the models, but",
        ),
        ("auth: {keys: [{id: a, env: NO_SUCH}]}", "config.yaml:1: auth.keys[0].env: environment variable 'NO_SUCH' is"),
        ("admin: {token: short}", "config.yaml:1: admin.token: has fewer than 16 characters"),
        ("admin: {tls: {cert: FOLDER/config.yaml}}", "holds no certificate in PEM form"),
    ],
)
def test_impossible_settings_are_reported_before_the_start(
    dynamo: Callable[..., Result], tmp_path: Path, config: str, says: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        config.replace("FOLDER", str(tmp_path)) + "\nworkers: {a: {model: {name: a}, engine: {use: mocker}}}\n"
    )

    ended = dynamo("check", path)

    assert ended.exit_code == 2
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
