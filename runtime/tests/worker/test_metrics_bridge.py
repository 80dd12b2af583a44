"""What an engine's own registry holds is shown among the worker's metrics, each name once, while the engine lives."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_telemetry.metrics import Metrics
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from runtime.tests.worker.engines import Plain


def foreign() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("vllm:running", "Running.", ["model"], registry=registry).labels("m").set(3)
    Counter("vllm:tokens", "Tokens.", registry=registry).inc(7)
    Histogram("vllm:wait_seconds", "Wait.", buckets=(1, 2), registry=registry).observe(1.5)
    Gauge("python_info", "Not asked for.", registry=registry).set(1)
    return registry


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    text = metrics.render_now().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    return found


def test_chosen_metrics_have_the_common_labels_and_others_are_not_shown() -> None:
    metrics = Metrics()
    scope = metrics.scope(worker="w-0")

    scope.bridge(foreign(), prefixes=["vllm:"])

    found = samples(metrics)
    assert found["vllm:running", (("model", "m"), ("worker", "w-0"))] == 3
    assert found["vllm:tokens_total", (("worker", "w-0"),)] == 7
    assert found["vllm:wait_seconds_count", (("worker", "w-0"),)] == 1
    assert {name.partition(":")[0] for name, _ in found} == {"vllm"}
    assert not any(name.endswith("_created") for name, _ in found)


def test_a_name_of_two_registries_is_written_once_with_the_samples_of_both() -> None:
    metrics = Metrics()
    for worker in ("w-0", "w-1"):
        metrics.scope(worker=worker).bridge(foreign(), prefixes=["vllm:"])

    found = samples(metrics)

    assert [labels for name, labels in found if name == "vllm:tokens_total"] == [
        (("worker", "w-0"),),
        (("worker", "w-1"),),
    ]


def test_a_registry_bridged_twice_is_exported_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics, registry = Metrics(), foreign()
    first, second = metrics.scope(worker="w-0"), metrics.scope(worker="w-1")
    first.bridge(registry, prefixes=["vllm:"])
    second.bridge(registry, prefixes=["vllm:"])

    both = [labels for name, labels in samples(metrics) if name == "vllm:tokens_total"]
    first.unbridge()
    left = [labels for name, labels in samples(metrics) if name == "vllm:tokens_total"]

    assert both == [(("worker", "w-0"),)]
    assert left == [(("worker", "w-1"),)]
    assert "bridged more than once" in caplog.text


def test_a_label_that_is_common_here_is_kept_under_another_name() -> None:
    metrics, registry = Metrics(), CollectorRegistry()
    Gauge("x_a", "A.", ["worker"], registry=registry).labels("theirs").set(1)

    metrics.scope(worker="ours").bridge(registry, prefixes=["x_"])

    assert samples(metrics) == {("x_a", (("exported_worker", "theirs"), ("worker", "ours"))): 1}


def test_a_conflicting_metric_name_is_skipped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    metrics, registry = Metrics(), CollectorRegistry()
    metrics.gauge("x_a", "Ours.").labels().set(1)
    Gauge("x_a", "Theirs.", registry=registry).set(2)
    metrics.bridge(registry, prefixes=["x_"])

    first, second = samples(metrics), samples(metrics)

    assert first == second == {("x_a", ()): 1}
    assert caplog.text.count("x_a") == 1


def test_a_failing_registry_does_not_break_the_page(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def describe(self) -> list[Any]:
            return []

        def collect(self) -> list[Any]:
            raise RuntimeError("the engine is gone")

    metrics, registry = Metrics(), CollectorRegistry()
    registry.register(Broken())
    metrics.gauge("ours", "Ours.").labels().set(1)
    metrics.bridge(registry, prefixes=["x_"])

    assert samples(metrics) == samples(metrics) == {("ours", ()): 1}
    assert caplog.text.count("cannot be collected") == 1


@pytest.mark.parametrize("prefixes", [[], [""]])
def test_the_metrics_bridge_refuses_empty_prefixes(prefixes: list[str]) -> None:
    with pytest.raises(ValueError, match="prefixes"):
        Metrics().bridge(CollectorRegistry(), prefixes=prefixes)


def test_a_registry_is_not_bridged_into_itself() -> None:
    metrics = Metrics()

    with pytest.raises(ValueError, match="itself"):
        metrics.bridge(metrics.registry, prefixes=["x_"])


class Bridging(Plain):
    """Keeps metrics of its own."""

    async def setup_metrics(self, metrics: MetricsScope) -> None:
        metrics.bridge(foreign(), prefixes=["vllm:"])


async def test_bridged_metrics_vanish_after_cleanup(ground: Any) -> None:
    worker = ground.worker(Bridging)
    await worker.start()

    during = samples(ground.metrics)
    await worker.stop()

    assert during["vllm:tokens_total", (("worker", "w-0"),)] == 7
    assert not any(name.startswith("vllm:") for name, _ in samples(ground.metrics))
