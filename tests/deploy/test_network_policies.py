"""The network policies of the chart and the Kustomize folders, held against pods that ask: what gets through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

Objects = list[dict[str, Any]]

#: Where the system is, and what names its pods.
HOME = "dynamo"


@dataclass(frozen=True)
class Peer:
    """Who asks, or is asked: a pod with labels in a namespace, or an address outside of the cluster."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = HOME
    address: str | None = None


STRANGER = Peer({"app": "other"})
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, namespace="monitoring")
OUTSIDE = Peer(address="203.0.113.7")


def pods(objects: Objects, component: str) -> list[tuple[Peer, dict[str, int]]]:
    """Return the pods of a component with their ports by name."""
    found = []
    for deployment in objects:
        if deployment["kind"] != "Deployment":
            continue
        template = deployment["spec"]["template"]
        labels = template["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] == component:
            [container] = template["spec"]["containers"]
            found.append((Peer(labels), {port["name"]: port["containerPort"] for port in container["ports"]}))
    assert found
    return found


def policies(objects: Objects, pod: Peer, direction: str) -> list[dict[str, Any]]:
    """Return those that restrict a pod."""
    return [
        found["spec"]
        for found in objects
        if found["kind"] == "NetworkPolicy"
        and direction in found["spec"]["policyTypes"]
        and _selects(found["spec"]["podSelector"], pod.labels)
    ]


def may_reach(objects: Objects, source: Peer, target: tuple[Peer, dict[str, int]], port: int) -> bool:
    """Return whether a pod takes a connection, as Kubernetes defines it: any rule of any policy that fits."""
    pod, ports = target
    restricting = policies(objects, pod, "Ingress")
    rules = [rule for policy in restricting for rule in policy.get("ingress", [])]
    return not restricting or any(_takes(rule, "from", source, ports, port) for rule in rules)


def may_ask(objects: Objects, source: Peer, target: Peer, port: int) -> bool:
    """Return whether a pod may open a connection."""
    restricting = policies(objects, source, "Egress")
    rules = [rule for policy in restricting for rule in policy.get("egress", [])]
    return not restricting or any(_takes(rule, "to", target, {}, port) for rule in rules)


def _takes(rule: dict[str, Any], direction: str, peer: Peer, named: dict[str, int], port: int) -> bool:
    peers, wanted = rule.get(direction), rule.get("ports")
    if peers and not any(_is(one, peer) for one in peers):
        return False
    return not wanted or any(_covers(one, named, port) for one in wanted)


def _covers(wanted: dict[str, Any], named: dict[str, int], port: int) -> bool:
    first = wanted["port"]
    first = named.get(first) if isinstance(first, str) else first
    return first is not None and first <= port <= wanted.get("endPort", first)


def _is(wanted: dict[str, Any], peer: Peer) -> bool:
    if "ipBlock" in wanted:
        return peer.address is not None and ip_address(peer.address) in ip_network(wanted["ipBlock"]["cidr"])
    if peer.address is not None:
        return False
    if "namespaceSelector" in wanted:
        if not _selects(wanted["namespaceSelector"], {"kubernetes.io/metadata.name": peer.namespace}):
            return False
    elif peer.namespace != HOME:
        return False
    return _selects(wanted.get("podSelector", {}), peer.labels)


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, "the evaluator of this test knows no others"
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def everybody(objects: Objects) -> Iterator[Peer]:
    yield from (STRANGER, PROMETHEUS, OUTSIDE)
    for component in ("frontend", "worker"):
        yield from (peer for peer, _ in pods(objects, component))


SOURCES = ("chart: mocker", "chart: nats-etcd", "kustomize: base", "kustomize: nats-etcd")


@pytest.fixture(params=SOURCES)
def objects(
    request: pytest.FixtureRequest,
    chart: Callable[..., Objects],
    example: Callable[[str], dict[str, Any]],
    kustomized: Callable[[str], Objects],
) -> Objects:
    tool, name = request.param.split(": ")
    if tool == "kustomize":
        return kustomized(name if name == "base" else f"overlays/{name}")
    return chart(example(name))


def test_every_pod_may_reach_the_api(objects: Objects) -> None:
    for frontend in pods(objects, "frontend"):
        assert all(may_reach(objects, source, frontend, frontend[1]["http"]) for source in everybody(objects))


def test_health_and_metrics_are_for_the_pods_of_the_namespace(objects: Objects) -> None:
    for part in (*pods(objects, "frontend"), *pods(objects, "worker")):
        reached = [source for source in everybody(objects) if may_reach(objects, source, part, part[1]["system"])]

        assert PROMETHEUS not in reached
        assert OUTSIDE not in reached
        assert STRANGER in reached


def test_calls_to_a_worker_come_from_the_pods_of_the_system_alone(objects: Objects) -> None:
    for worker in pods(objects, "worker"):
        for port in (worker[1].get("calls", 7100), 1, 22, 50_000):
            assert not any(may_reach(objects, source, worker, port) for source in (STRANGER, PROMETHEUS, OUTSIDE))
        if "calls" in worker[1]:
            assert all(
                may_reach(objects, source, worker, worker[1]["calls"]) for source, _ in pods(objects, "frontend")
            )


def test_engines_of_workers_may_reach_each_other_as_they_need(objects: Objects) -> None:
    # One hands the KV cache of a prompt to another on ports of its own.
    for worker in pods(objects, "worker"):
        assert all(may_reach(objects, source, worker, 5600) for source, _ in pods(objects, "worker"))
        assert not any(may_reach(objects, source, worker, 5600) for source, _ in pods(objects, "frontend"))


def test_frontends_may_reach_each_other(objects: Objects) -> None:
    calls = {port for _, ports in pods(objects, "worker") if (port := ports.get("calls"))}
    for frontend in pods(objects, "frontend"):
        for port in calls:
            assert may_reach(objects, frontend[0], frontend, port)
            assert not any(may_reach(objects, source, frontend, port) for source in (STRANGER, PROMETHEUS, OUTSIDE))
        assert not any(may_reach(objects, source, frontend, 22) for source in everybody(objects))


def test_egress_is_unrestricted_by_default(objects: Objects) -> None:
    for component in ("frontend", "worker"):
        for pod, _ in pods(objects, component):
            assert may_ask(objects, pod, OUTSIDE, 443)


# Values of the chart.


@pytest.fixture
def rendered(chart: Callable[..., Objects], example: Callable[[str], dict[str, Any]]) -> Callable[..., Objects]:
    """Return the chart with an example's values and some for its policies."""

    def render(policy: dict[str, Any], name: str = "mocker", release: str = "dynamo", **more: Any) -> Objects:
        return chart(example(name) | {"networkPolicy": policy} | more, release)

    return render


def test_without_policies_the_cluster_decides(rendered: Callable[..., Objects]) -> None:
    objects = rendered({"enabled": False})

    assert not [found for found in objects if found["kind"] == "NetworkPolicy"]


def test_the_api_can_be_kept_to_some(rendered: Callable[..., Objects]) -> None:
    gateway = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}
    objects = rendered({"api": [gateway, {"ipBlock": {"cidr": "203.0.113.0/24"}}]})

    [frontend] = pods(objects, "frontend")
    reached = [
        peer for peer in (*everybody(objects), Peer(namespace="gateway")) if may_reach(objects, peer, frontend, 8000)
    ]
    assert reached == [OUTSIDE, Peer(namespace="gateway")]


def test_metrics_can_be_opened_to_others_and_every_process_of_a_frontend_has_a_port(
    rendered: Callable[..., Objects], example: Callable[[str], dict[str, Any]]
) -> None:
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    config = example("mocker")["config"] | {"frontend": {"processes": 3}, "admin": {"port": 9300}}
    objects = rendered({"system": [monitoring]}, config=config)

    [frontend], [worker] = pods(objects, "frontend"), pods(objects, "worker")
    assert [port for port in range(9290, 9310) if may_reach(objects, PROMETHEUS, frontend, port)] == [9300, 9301, 9302]
    assert may_reach(objects, PROMETHEUS, worker, 9090)
    assert not may_reach(objects, STRANGER, frontend, 9300)


def test_two_systems_in_one_namespace_do_not_reach_each_other(rendered: Callable[..., Objects]) -> None:
    one, other = rendered({}, release="one"), rendered({}, release="two")
    objects = one + other

    [worker] = pods(one, "worker")
    assert may_reach(objects, pods(one, "frontend")[0][0], worker, 7100)
    assert not may_reach(objects, pods(other, "frontend")[0][0], worker, 7100)
    assert not may_reach(objects, pods(other, "worker")[0][0], worker, 7100)


def test_servers_of_the_namespace_can_be_kept_to_the_system(rendered: Callable[..., Objects]) -> None:
    servers = [{"name": "nats", "podSelector": {"matchLabels": {"app": "nats"}}, "ports": [4222]}]
    objects = rendered({"servers": servers}, "nats-etcd")
    nats = Peer({"app": "nats"}), dict[str, int]()

    for component in ("frontend", "worker"):
        assert all(may_reach(objects, pod, nats, 4222) for pod, _ in pods(objects, component))
    assert not any(may_reach(objects, source, nats, 4222) for source in (STRANGER, PROMETHEUS, OUTSIDE))


@pytest.mark.parametrize(
    ("name", "ports"), [("mocker", [53, 443, 6443, 7100]), ("nats-etcd", [53, 2379, 4222])], ids=str
)
def test_egress_can_be_restricted_to_configured_targets(
    rendered: Callable[..., Objects], name: str, ports: Sequence[int]
) -> None:
    otlp = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 4318, "protocol": "TCP"}]}
    objects = rendered({"egress": {"enabled": True, "more": [otlp]}}, name)
    collector = Peer({"app": "otel"}, namespace="observability")

    for component in ("frontend", "worker"):
        for pod, _ in pods(objects, component):
            asked = [port for port in range(1, 10_000) if may_ask(objects, pod, OUTSIDE, port)]
            assert asked == [port for port in ports if port != 7100]
            assert may_ask(objects, pod, collector, 4318)
            # Each other, on any port: calls, and what engines hand over.
            assert all(may_ask(objects, pod, other, 7100) for other, _ in pods(objects, "worker"))


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        ({"enabled": "yes"}, "enabled"),
        ({"apis": []}, "apis"),
        ({"api": {}}, "api"),
        ({"servers": [{"name": "nats"}]}, "podSelector"),
        ({"egress": {"to": []}}, "to"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(
    refusal: Callable[[dict[str, Any]], str], example: Callable[[str], dict[str, Any]], policy: Any, word: str
) -> None:
    assert word in refusal(example("mocker") | {"networkPolicy": policy})
