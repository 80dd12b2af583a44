"""What the Prometheus operator scrapes of the pods that chart and Kustomize make, with either of the two monitors.

The operator makes a scrape configuration of a monitor: it keeps what the selectors and the port name, gives a `job`,
and then applies the monitor's own relabelings. The tests do the same, and promtool applies it to the targets that
Prometheus would find.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import Objects
from tests.deploy.prometheus import PACK, RULES, promtool

NAMESPACE = "models"
META = "__meta_kubernetes_"


def read(name: str) -> Objects:
    return list(yaml.safe_load_all((PACK / "kubernetes" / name).read_text()))


def labels_of(kind: str, found: dict[str, Any]) -> dict[str, str]:
    """Return the labels of an object, as discovery gives them to a target."""
    labels = found["metadata"]["labels"].items()
    return {f"{META}{kind}_label_{re.sub('[^A-Za-z0-9_]', '_', key)}": value for key, value in labels}


def keep(source: str, value: str) -> dict[str, Any]:
    return {"action": "keep", "source_labels": [source], "regex": re.escape(value)}


def kept(kind: str, monitor: dict[str, Any]) -> list[dict[str, Any]]:
    selector = {"metadata": {"labels": monitor["spec"]["selector"]["matchLabels"]}}
    return [keep(label, value) for label, value in labels_of(kind, selector).items()]


def own(endpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the relabelings of an endpoint, in the words of Prometheus."""
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label", "replacement": "replacement"}
    return [{names[key]: value for key, value in rule.items()} for rule in endpoint["relabelings"]]


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any], dict[str, int], dict[str, str]]]:
    """Yield one pod of each Deployment: its address, its template, its ports by name, and the labels of its targets."""
    for number, found in enumerate(found for found in objects if found["kind"] == "Deployment"):
        template = found["spec"]["template"]
        [container] = template["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        yield f"10.0.0.{number}", template, ports, labels_of("pod", template)


def with_pod_monitor(objects: Objects) -> dict[str, Any]:
    """Return every port of every pod as a target."""
    [monitor] = read("podmonitor.yaml")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    targets = [
        {"targets": [f"{address}:{number}"], "labels": {**labels, f"{META}pod_container_port_name": name}}
        for address, _, ports, labels in pods(objects)
        for name, number in ports.items()
    ]
    rules = [
        *kept("pod", monitor),
        keep(f"{META}pod_container_port_name", endpoint["port"]),
        {"target_label": "job", "replacement": f"{NAMESPACE}/{monitor['metadata']['name']}"},
        *own(endpoint),
    ]
    return {"static_configs": targets, "relabel_configs": rules}


def with_service_monitor(objects: Objects) -> dict[str, Any]:
    """Return every port of a Service as a target for each of its pods.

    So is each other port of those, without a name.
    """
    service, monitor = read("servicemonitor.yaml")
    [endpoint] = monitor["spec"]["endpoints"]
    targets = []
    for found in [service, *(one for one in objects if one["kind"] == "Service")]:
        of_service = {f"{META}service_name": found["metadata"]["name"], **labels_of("service", found)}
        for address, template, ports, labels in pods(objects):
            if found["spec"]["selector"].items() <= template["metadata"]["labels"].items():
                named = {ports[port["targetPort"]]: port["name"] for port in found["spec"]["ports"]}
                for number in ports.values():
                    endpoint_port = {f"{META}endpoint_port_name": named.get(number, "")}
                    one = {"targets": [f"{address}:{number}"], "labels": {**of_service, **labels, **endpoint_port}}
                    targets.append(one)
    rules = [
        *kept("service", monitor),
        keep(f"{META}endpoint_port_name", endpoint["port"]),
        {"source_labels": [f"{META}service_name"], "target_label": "job"},
        *own(endpoint),
    ]
    return {"static_configs": targets, "relabel_configs": rules}


@pytest.mark.parametrize("monitor", [with_pod_monitor, with_service_monitor])
def test_each_pod_is_scraped_once_at_its_metrics_as_the_job_that_the_rules_name(
    objects: Objects, monitor: Callable[[Objects], dict[str, Any]], tmp_path: Path
) -> None:
    config = {"scrape_configs": [{"job_name": "monitor", **monitor(objects)}]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))

    text = promtool("check", "service-discovery", "--timeout=1s", "prometheus.yml", "monitor", folder=tmp_path)

    scraped = [found["labels"] for found in json.loads(text) if found["labels"]]
    component = "app.kubernetes.io/component"
    expected = {
        f"{address}:{ports['system']}": f"dynamo-{template['metadata']['labels'][component]}"
        for address, template, ports, _ in pods(objects)
    }
    assert sorted((one["instance"], one["job"]) for one in scraped) == sorted(expected.items())
    [selector] = set(re.findall(r'job=~"([^"]+)"', RULES.read_text()))
    frontends = [job for job in expected.values() if re.fullmatch(selector, job)]
    assert frontends == ["dynamo-frontend"]


def test_the_service_of_the_service_monitor_is_one_of_the_cluster(library: Callable[[str], Any]) -> None:
    service, _ = read("servicemonitor.yaml")

    library("kubernetes_validate").validate(service, "1.27", strict=True)

    # Without an address of its own it leads to each pod, ready or not.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
