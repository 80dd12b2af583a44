"""What the chart and the Kustomize folders render to: objects that agree with each other and with their config."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from dynamo_runtime.settings import LoadedSettings, load_settings

from tests.e2e.asking import dynamo

REPOSITORY = Path(__file__).parents[2]

#: The oldest version that the chart is for, and the newest that there are schemas of.
VERSIONS = ("1.27", "1.37")

Objects = list[dict[str, Any]]


def of(objects: Objects, *kinds: str) -> Iterator[dict[str, Any]]:
    return (found for found in objects if found["kind"] in kinds)


def one(objects: Objects, kind: str) -> dict[str, Any]:
    [found] = of(objects, kind)
    return found


def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    [found] = pod(deployment)["containers"]
    return dict(found)


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def config_text(objects: Objects) -> str:
    text: str = one(objects, "ConfigMap")["data"]["dynamo.yaml"]
    return text


def references(text: str) -> set[str]:
    return set(re.findall(r"\$\{env:([^}]+)\}", text))


@pytest.fixture
def environment(objects: Objects) -> dict[str, str]:
    """Return something for every variable that the config refers to."""
    return dict.fromkeys(references(config_text(objects)), "0123456789abcdef") | {"POD_IP": "127.0.0.1"}


@pytest.fixture
def settings(objects: Objects, environment: dict[str, str], tmp_path: Path) -> LoadedSettings:
    path = tmp_path / "dynamo.yaml"
    path.write_text(config_text(objects))
    return load_settings(path, env=environment)


def test_every_object_is_one_of_the_cluster(objects: Objects, library: Callable[[str], Any]) -> None:
    validate = library("kubernetes_validate").validate
    for version in VERSIONS:
        for found in objects:
            validate(found, version, strict=True)


def test_no_two_objects_have_one_name(objects: Objects) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]

    assert len(set(names)) == len(names)
    # The bound of names of Services and of what becomes a part of labels.
    assert all(len(name) <= 63 for _, name in names)


def test_every_selector_finds_the_pods_of_one_deployment_and_no_others(objects: Objects) -> None:
    deployments = {found["metadata"]["name"]: found for found in of(objects, "Deployment")}
    labels = {name: found["spec"]["template"]["metadata"]["labels"] for name, found in deployments.items()}

    selectors = {name: found["spec"]["selector"]["matchLabels"] for name, found in deployments.items()}
    for found in of(objects, "PodDisruptionBudget", "Service"):
        selector = found["spec"]["selector"]
        name = found["metadata"]["name"]
        assert selector.get("matchLabels", selector) == selectors[name]
    for name, selector in selectors.items():
        assert [other for other in labels if matches(selector, labels[other])] == [name]
    for found in of(objects, "HorizontalPodAutoscaler"):
        target = found["spec"]["scaleTargetRef"]
        assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": found["metadata"]["name"]}
        # The autoscaler says how many; a number here would take that back with every upgrade.
        assert "replicas" not in deployments[target["name"]]["spec"]


def test_ports_are_those_of_the_config_and_probes_and_services_name_them(
    objects: Objects, settings: LoadedSettings
) -> None:
    config = settings.settings
    for deployment in of(objects, "Deployment"):
        own = container(deployment)
        ports = {port["name"]: port["containerPort"] for port in own["ports"]}
        if own["args"][0] == "frontend":
            assert ports == {"http": config.frontend.port, "system": config.admin.port}
            assert {config.frontend.host, config.admin.host} == {"0.0.0.0"}
            assert own["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "system"}
            started = "/live"
        else:
            worker = config.workers[own["args"][1]]
            bind = yaml.safe_load(config_text(objects))["transport"].get("bind")
            calls = {"calls": int(bind.rpartition(":")[2])} if bind else {}
            assert ports == {"system": worker.system_port} | calls
            assert worker.system_host == "0.0.0.0"
            assert own["readinessProbe"]["httpGet"] == {"path": "/health", "port": "system"}
            # A worker says on /live that it lives while it loads its model.
            started = "/health"
        assert own["startupProbe"]["httpGet"] == {"path": started, "port": "system"}
        assert own["livenessProbe"]["httpGet"] == {"path": "/live", "port": "system"}
    frontend = next(found for found in of(objects, "Deployment") if container(found)["args"][0] == "frontend")
    for port in one(objects, "Service")["spec"]["ports"]:
        assert port["targetPort"] in {port["name"] for port in container(frontend)["ports"]}


def test_each_part_has_the_time_that_its_own_deadlines_give_it(objects: Objects, settings: LoadedSettings) -> None:
    config = settings.settings
    for deployment in of(objects, "Deployment"):
        kind, *words = container(deployment)["args"]
        if kind == "frontend":
            own = config.client.drain_grace + config.client.shutdown_timeout
        else:
            own = config.workers[words[0]].grace_period + config.workers[words[0]].shutdown_timeout
        given = pod(deployment)["terminationGracePeriodSeconds"]
        assert given == math.ceil(own + 10)
        # A part that ends says so on /live; nobody may take that for a reason to kill it.
        liveness = container(deployment)["livenessProbe"]
        assert liveness["periodSeconds"] * (liveness["failureThreshold"] - 1) >= given


def test_pods_may_do_nothing_that_they_need_not(objects: Objects) -> None:
    for deployment in of(objects, "Deployment"):
        spec, own = pod(deployment), container(deployment)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # Where the image writes, since its own disk is read-only.
        writable = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
        mounts = {mount["mountPath"] for mount in own["volumeMounts"] if mount["name"] in writable}
        assert mounts == {"/tmp", "/var/cache/dynamo"}
        assert not any("hostPath" in volume for volume in spec["volumes"])
        assert own["resources"].get("limits")


def test_pods_see_no_variables_of_other_services(objects: Objects) -> None:
    # A Service called dyn-x would give them DYN_X_SERVICE_HOST, which is an unknown setting: nothing would start.
    assert all(pod(deployment)["enableServiceLinks"] is False for deployment in of(objects, "Deployment"))


def test_referenced_variables_are_set_and_the_config_has_no_secret(objects: Objects) -> None:
    for deployment in of(objects, "Deployment"):
        variables = {entry["name"]: entry for entry in container(deployment)["env"]}
        assert references(config_text(objects)) <= variables.keys()
        secret = {name for name, entry in variables.items() if "secretKeyRef" in entry.get("valueFrom", {})}
        assert secret == references(config_text(objects)) - {"POD_IP"}
    assert not list(of(objects, "Secret"))


def test_the_config_is_the_one_that_is_mounted_and_a_changed_one_makes_new_pods(objects: Objects) -> None:
    name = one(objects, "ConfigMap")["metadata"]["name"]
    for deployment in of(objects, "Deployment"):
        assert {"name": "config", "configMap": {"name": name}} in pod(deployment)["volumes"]
        assert container(deployment)["args"][-1] == "/etc/dynamo/dynamo.yaml"
        annotations = deployment["spec"]["template"]["metadata"].get("annotations", {})
        # Kustomize puts the hash into the name.
        assert "checksum/config" in annotations or re.search(r"-[a-z0-9]{10}$", name)


def test_the_config_passes_the_check(
    objects: Objects,
    settings: LoadedSettings,
    environment: dict[str, str],
    tmp_path: Path,
    offered: Callable[..., None],
) -> None:
    offered("discovery", settings.settings.discovery.use)
    offered("transport", settings.settings.transport.use)

    result = dynamo("check", str(tmp_path / "dynamo.yaml"), **environment)

    assert result.exit_code == 0, result.stderr
    assert "The config is sound." in result.stdout


@pytest.fixture
def offered() -> Callable[[str, str], None]:
    """Skip where the plugin is not installed, and fail in CI."""

    def look(kind: str, name: str) -> None:
        if f"{kind}-{name}" not in entry_points(group="dynamo").names:
            text = f"NOT TESTED: the plugin {kind} {name} is not installed"
            if os.environ.get("CI") == "1":
                pytest.fail(text)
            pytest.skip(text)

    return look


def test_service_accounts_have_exactly_the_permissions_of_discovery(objects: Objects, settings: LoadedSettings) -> None:
    uses = settings.settings.discovery.use == "kubernetes"
    account = one(objects, "ServiceAccount")["metadata"]["name"]

    for deployment in of(objects, "Deployment"):
        assert pod(deployment)["serviceAccountName"] == account
        assert pod(deployment)["automountServiceAccountToken"] is uses
    if not uses:
        assert not list(of(objects, "Role", "RoleBinding"))
        return
    role, binding = one(objects, "Role"), one(objects, "RoleBinding")
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": role["metadata"]["name"],
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "dynamo"}]
    page = (REPOSITORY / "plugins" / "discovery" / "kubernetes" / "README.md").read_text()
    [documented] = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.S) if "kind: Role\n" in text]
    assert role["rules"] == yaml.safe_load(documented)["rules"]


def test_evictions_take_one_pod_of_a_part_at_a_time(objects: Objects) -> None:
    for budget in of(objects, "PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] == 1
        # One that is not ready serves nobody: it must not hold up a node that is drained.
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_chart_and_kustomize_base_are_the_same_deployment(rendered: Callable[[str], Objects]) -> None:
    assert _comparable(rendered("chart: mocker")) == _comparable(rendered("kustomize: base"))


def _comparable(objects: Objects) -> dict[tuple[str, str], Any]:
    """Return the objects by kind and name, without what only one of the tools adds."""
    name = one(objects, "ConfigMap")["metadata"]["name"]
    plain = yaml.safe_load(yaml.safe_dump(objects).replace(name, "CONFIG"))
    for found in plain:
        found["metadata"].pop("namespace", None)
        labels = found["metadata"].get("labels", {})
        for label in ("app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"):
            labels.pop(label, None)
        if found["kind"] == "ConfigMap":
            found["metadata"].pop("labels", None)
            found["data"] = yaml.safe_load(found["data"]["dynamo.yaml"])
        if found["kind"] == "Deployment":
            found["spec"]["template"]["metadata"].pop("annotations", None)
    return {(found["kind"], found["metadata"]["name"]): found for found in plain}
