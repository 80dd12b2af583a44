"""Who asks, where, with which permissions, and what is told when that does not do."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_plugin_discovery_kubernetes import access as accesses
from dynamo_plugin_discovery_kubernetes.access import Token, find_access
from dynamo_plugin_discovery_kubernetes.config import KubernetesConfig
from dynamo_plugin_discovery_kubernetes.discovery import KubernetesDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.servers.certificates import make_certificates
from pydantic import ValidationError

README = (Path(__file__).parents[1] / "README.md").read_text()
AROUND = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


def documented_role() -> set[tuple[str, str]]:
    """Return pairs of verb and resource."""
    found = re.search(r"```yaml\n(apiVersion: rbac.*?)```", README, re.DOTALL)
    assert found is not None
    rules = yaml.safe_load(found[1])["rules"]
    return {(verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """Return a service account as Kubernetes mounts it, for a server without encryption."""
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("inference")
    return folder


async def test_the_role_of_the_readme_is_enough_for_everything(api: Any, make: Any, see: Any) -> None:
    await api.put("pods", {"metadata": {"name": "worker-0"}})
    api.tokens["role"] = documented_role()
    one, other = make(token="role", pod="worker-0"), make(token="role")
    await one.start()
    lease, seen = await one.lease(), see(other)

    await lease.put("a", b"1")
    await lease.put("a", b"2")
    await one.put_value("b", b"1")
    await other.put_value("b", b"2")
    await seen.shows({"a": b"2", "b": b"2"})
    await lease.remove("a")
    await other.put_value("b", None)
    await seen.shows({})
    api.conflict(1)
    while api._conflicts:
        await lease.put("again", b"")
    await lease.aclose()

    assert api.names("leases") == []


@pytest.mark.parametrize(("verb", "resource"), sorted(documented_role() - {("get", "pods")}))
async def test_a_missing_permission_is_a_config_error(api: Any, make: Any, verb: str, resource: str) -> None:
    api.tokens["role"] = documented_role() - {(verb, resource)}

    with pytest.raises(
        ConfigError,
        match=rf"^discovery: Kubernetes at http.* cannot {verb} resource \"{resource}\"; the plugin's README",
    ):
        await make(token="role").start()
    assert api.names("leases") == api.names("configmaps") == []


async def test_trying_out_writes_nothing(api: Any, make: Any) -> None:
    before = api.version

    await make().start()

    assert api.version == before


@pytest.mark.parametrize("how", [{"token": "role", "pod": "worker-0"}, {"pod": "nobody"}], ids=["forbidden", "unknown"])
async def test_leases_of_a_pod_that_cannot_be_read_have_no_owner(
    api: Any, make: Any, how: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    api.tokens["role"] = documented_role() - {("get", "pods")}
    discovery = make(**how)

    await discovery.start()
    await discovery.lease()

    assert len(api.names("leases")) == 1
    assert "leases are owned by no pod, and expire only" in caplog.text


async def test_a_token_that_is_replaced_in_its_file_is_used_as_soon_as_the_old_one_is_refused(
    api: Any, make: Any, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    api.namespaces.add("inference")
    api.tokens = {"first": None}
    await api.put("pods", {"metadata": {"name": "worker-0"}}, "inference")
    discovery = make(token=None, service_account=account, pod="worker-0")
    await discovery.start()
    lease = await discovery.lease()

    (account / "token").write_text("second\n")
    api.tokens = {"second": None}
    await lease.put("a", b"1")

    assert len(api.names("configmaps", "inference")) == 1
    assert not lease.lost.is_set()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not re.search("Bearer|second|first", caplog.text)


def test_a_token_is_read_again_before_the_old_one_ends_and_survives_a_moment_without_its_file(tmp_path: Path) -> None:
    file, now = tmp_path / "token", 0.0
    file.write_text("first\n")
    token = Token(None, file, "discovery.token_file", lambda: now)
    file.write_text("second\n")

    assert token.current() == "first"
    now += accesses.REREAD
    assert token.current() == "second"
    file.unlink()
    now += accesses.REREAD
    assert token.current() == "second"
    assert not token.another("second")


@pytest.mark.parametrize("how", [{"token": "unknown"}, {"token": None}], ids=["unknown", "none"])
async def test_a_refused_token_is_a_config_error_that_hides_it(api: Any, make: Any, how: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^discovery\.token: Kubernetes at http.* refuses the token") as raised:
        await make(**how).start()
    assert "unknown" not in str(raised.value)


async def test_a_missing_namespace_is_a_config_error_with_a_remedy(api: Any, make: Any) -> None:
    with pytest.raises(ConfigError, match=r'^discovery\.namespace: .*namespaces "nowhere" not found; make it'):
        await make(namespace="nowhere").start()


async def test_a_server_that_is_not_there_is_waited_for_and_then_named(make: Any) -> None:
    with pytest.raises(CannotConnect, match=r"^discovery\.url: Kubernetes at http://127\.0\.0\.1:1 cannot be reached"):
        await make(url="http://127.0.0.1:1", start_timeout=0.1).start()


async def test_a_foreign_server_is_a_config_error_with_a_remedy(make: Any, aiohttp_page: str) -> None:
    with pytest.raises(ConfigError, match=r"^discovery\.url: .*no object of Kubernetes; it must be the API server"):
        await make(url=aiohttp_page).start()


@pytest.fixture
async def aiohttp_page() -> Any:
    """Return some other web server."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<html>Welcome</html>", content_type="text/html")

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def test_in_a_pod_access_comes_from_the_service_account(
    account: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(accesses, "SERVICE_ACCOUNT", account)
    monkeypatch.setattr(accesses, "client_context", lambda tls, setting: tls)

    found = find_access(KubernetesConfig(), AROUND | {"POD_NAME": "worker-0"})

    assert (found.url, found.namespace, found.pod) == ("https://10.0.0.1:6443", "inference", "worker-0")
    assert found.token.current() == "first"
    assert found.tls is not None
    assert found.tls.ca == account / "ca.crt"  # type: ignore[attr-defined]
    assert find_access(KubernetesConfig(), {"KUBERNETES_SERVICE_HOST": "fd00::1"}).url == "https://[fd00::1]:443"
    assert find_access(KubernetesConfig(), AROUND).pod == socket.gethostname()


def test_the_pods_token_is_not_sent_to_a_server_that_the_settings_name(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accesses, "SERVICE_ACCOUNT", account)

    found = find_access(KubernetesConfig(url="http://127.0.0.1:8001"), AROUND)

    assert (found.namespace, found.pod, found.token.current()) == ("default", None, None)


def test_outside_of_a_cluster_the_address_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"^discovery\.url: this process runs in no pod of Kubernetes .*; set `url`$"):
        find_access(KubernetesConfig(), {})


def test_files_that_are_missing_are_named(tmp_path: Path, account: Path) -> None:
    url = "http://127.0.0.1:8001"
    with pytest.raises(ConfigError, match=r"^discovery\.token_file: '.*nothing' cannot be read: No such file"):
        find_access(KubernetesConfig(url=url, token_file=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"^discovery\.namespace: .* set `namespace`$"):
        find_access(KubernetesConfig(url=url, service_account=tmp_path))
    with pytest.raises(ConfigError, match=r"^discovery\.tls\.ca: '.*ca\.crt' cannot be used: No such file"):
        find_access(KubernetesConfig(url="https://127.0.0.1:8001", service_account=account))


async def test_the_servers_certificate_is_checked_against_the_service_accounts_authority(
    serve: Any, make: Any, see: Any, tmp_path: Path, account: Path
) -> None:
    certificates = await asyncio.to_thread(make_certificates, tmp_path, node="IP:127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "node.crt", certificates / "node.key")
    api = await serve(tls=context)
    api.namespaces.add("inference")
    api.tokens = {"first": None}
    shutil.copy(certificates / "ca.crt", account / "ca.crt")
    discovery = make(url=api.url, token=None, service_account=account)

    await discovery.start()
    lease, seen = await discovery.lease(), see(discovery)
    await lease.put("a", b"1")
    await seen.shows({"a": b"1"})

    with pytest.raises(ConfigError, match=r"^discovery\.tls\.ca: .*certificate verify failed.*; name the authority"):
        await make(url=api.url).start()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"url": "https://user:hunter2@host"}, "set `token`"),
        ({"url": "http://api.example:6443"}, "write https://"),
        ({"url": "ftp://api.example"}, "is not https://host:port"),
        ({"url": "https://api.example:x"}, "a port that is none"),
        ({"token": "a", "token_file": "b"}, "set one"),
        ({"namespace": "Upper"}, "namespace"),
        ({"prefix": "a/b"}, "prefix"),
        ({"tls": {"cert": "a"}}, "belong together"),
        ({"heartbeat": 8}, "heartbeat"),
        ({"poll": 6}, "poll"),
        ({"timeout": 6}, "timeout"),
        ({"ttl": 0.5}, "ttl"),
        ({"urls": "x"}, "urls"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError) as raised:
        KubernetesConfig.model_validate(settings)

    # What pydantic adds about the input is left out by the loader.
    assert told in str(raised.value)


@pytest.mark.parametrize("key", sorted(set(KubernetesConfig.model_fields) - {"tls"}))
def test_every_setting_is_in_the_readme(key: str) -> None:
    assert f"`{key}`" in README.split("## Permissions")[0]


async def test_closing_needs_neither_a_start_nor_a_server() -> None:
    await KubernetesDiscovery(KubernetesConfig(), Metrics()).aclose()
