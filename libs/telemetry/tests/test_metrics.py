from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_runtime.worker.metrics import WorkerMetrics
from dynamo_telemetry import metrics as metrics_module
from dynamo_telemetry.metrics import Histogram, Metrics
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def text_of(metrics: Metrics) -> str:
    return metrics.render_now().decode()


def test_metrics_fulfil_the_contract_of_plugins() -> None:
    scope: MetricsScope = Metrics()

    assert isinstance(scope, MetricsScope)


def test_the_text_of_every_type_is_exactly_this() -> None:
    metrics = Metrics(labels={"zone": "b"})
    metrics.counter("jobs_total", "Jobs\nthat \\ ended.", ("kind",)).labels('a"b').inc(2)
    metrics.gauge("depth", "Depth.").labels().set(-1.5)
    metrics.histogram("wait_seconds", "Wait.", buckets=(0.1, 2)).labels().observe(0.1)

    text = text_of(metrics)

    assert text == (
        "# HELP depth Depth.\n"
        "# TYPE depth gauge\n"
        'depth{zone="b"} -1.5\n'
        "# HELP jobs_total Jobs\\nthat \\\\ ended.\n"
        "# TYPE jobs_total counter\n"
        'jobs_total{kind="a\\"b",zone="b"} 2.0\n'
        "# HELP wait_seconds Wait.\n"
        "# TYPE wait_seconds histogram\n"
        'wait_seconds_bucket{zone="b",le="0.1"} 1.0\n'
        'wait_seconds_bucket{zone="b",le="2.0"} 1.0\n'
        'wait_seconds_bucket{zone="b",le="+Inf"} 1.0\n'
        'wait_seconds_sum{zone="b"} 0.1\n'
        'wait_seconds_count{zone="b"} 1.0\n'
    )


def test_a_counter_without_total_in_its_name_is_not_given_one() -> None:
    metrics = Metrics()

    metrics.counter("events_applied", "Applied.").labels().inc()

    assert text_of(metrics).splitlines()[1:] == ["# TYPE events_applied counter", "events_applied 1.0"]


def test_no_created_series_appear() -> None:
    metrics = Metrics()
    metrics.counter("a_total", "A.").labels().inc()
    metrics.histogram("b_seconds", "B.").labels().observe(1)

    assert "_created" not in text_of(metrics)
    assert "_created" not in generate_latest(metrics.registry).decode()


def test_a_metric_without_labels_shows_as_zero_from_the_start() -> None:
    metrics = Metrics()

    metrics.gauge("idle", "Idle.")
    metrics.gauge("by_model", "By model.", ("model",))

    assert "\nidle 0.0\n" in text_of(metrics)
    assert "by_model{" not in text_of(metrics)


def test_readers_of_the_registry_see_exact_names_too() -> None:
    metrics = Metrics(labels={"zone": "b"})
    metrics.counter("a_total", "A.", ("kind",)).labels("x").inc(3)
    metrics.counter("b", "B.").labels().inc(4)
    metrics.histogram("c", "C.", buckets=(1,)).labels().observe(0.5)

    value = metrics.registry.get_sample_value

    assert value("a_total", {"zone": "b", "kind": "x"}) == 3
    assert value("b", {"zone": "b"}) == 4
    assert value("c_bucket", {"zone": "b", "le": "1.0"}) == 1
    assert value("c_count", {"zone": "b"}) == 1


def test_a_plugins_collector_is_rendered_with_ours() -> None:
    metrics = Metrics()
    metrics.gauge("ours", "Ours.").labels().set(1)
    Gauge("theirs", "Theirs.", registry=metrics.registry).set(2)

    text = text_of(metrics)

    assert text.count("\nours 1.0\n") == 1
    assert text.count("\ntheirs 2.0\n") == 1


def test_a_name_that_a_plugin_registered_itself_cannot_be_taken() -> None:
    registry = CollectorRegistry()
    Gauge("depth", "Theirs.", registry=registry)

    with pytest.raises(ValueError, match="depth"):
        Metrics(registry).gauge("depth", "Ours.")


def test_scopes_with_the_same_common_labels_share_a_family() -> None:
    metrics = Metrics()
    one, two = metrics.scope(worker="1"), metrics.scope(worker="2")

    one.gauge("depth", "Depth.", ("rank",)).labels("0").set(1)
    two.gauge("depth", "Depth.", ("rank",)).labels("0").set(2)

    text = text_of(metrics)
    assert text.count("# TYPE depth gauge") == 1
    assert 'depth{rank="0",worker="1"} 1.0' in text
    assert 'depth{rank="0",worker="2"} 2.0' in text


def test_the_same_metric_returns_the_same_child() -> None:
    metrics = Metrics()

    metrics.counter("a_total", "A.", ("x",)).labels("1").inc()
    metrics.counter("a_total", "A.", ("x",)).labels("1").inc()

    assert 'a_total{x="1"} 2.0' in text_of(metrics)


def test_the_same_name_with_another_type_labels_or_buckets_is_refused() -> None:
    metrics = Metrics()
    metrics.counter("a", "A.", ("x",))
    metrics.histogram("h", "H.", buckets=(1, 2))

    with pytest.raises(ValueError, match="in use as a counter"):
        metrics.gauge("a", "A.", ("x",))
    with pytest.raises(ValueError, match="asked for a counter with labels"):
        metrics.counter("a", "A.", ("y",))
    with pytest.raises(ValueError, match="asked for a counter with labels"):
        metrics.scope(worker="1").counter("a", "A.", ("x",))
    with pytest.raises(ValueError, match="other buckets"):
        metrics.histogram("h", "H.", buckets=(1, 3))


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        Metrics().gauge(name, "Bad.")


def test_bad_labels_are_refused() -> None:
    metrics = Metrics(labels={"zone": "b"})

    with pytest.raises(ValueError, match="label"):
        metrics.gauge("a", "A.", ("__a",))
    with pytest.raises(ValueError, match="twice"):
        metrics.gauge("a", "A.", ("zone",))
    with pytest.raises(ValueError, match="le"):
        metrics.histogram("a", "A.", ("le",))
    with pytest.raises(ValueError, match="already"):
        metrics.scope(zone="c")
    with pytest.raises(ValueError, match="1 label values"):
        metrics.gauge("a", "A.", ("x",)).labels()


def test_buckets_must_grow() -> None:
    with pytest.raises(ValueError, match="must grow"):
        Metrics().histogram("h", "H.", buckets=(1, 1))


def test_a_counter_does_not_go_down() -> None:
    counter = Metrics().counter("a_total", "A.").labels()

    with pytest.raises(ValueError, match="down"):
        counter.inc(-1)


def test_removing_a_child_is_idempotent() -> None:
    metrics = Metrics(labels={"zone": "b"})
    family = metrics.gauge("depth", "Depth.", ("rank",))
    family.labels("0").set(1)

    family.remove("0")
    family.remove("0")

    assert "depth{" not in text_of(metrics)


@given(st.lists(st.floats(0, 100)))
def test_observations_counted_elsewhere_add_up_to_the_same(values: list[float]) -> None:
    bounds = (1.0, 5.0, 25.0)
    direct, local, bulk = Histogram(bounds), Histogram(bounds), Histogram(bounds)
    for value in values:
        direct.observe(value)
        local.observe(value)

    bulk.observe_many(local.counts, local.sum)

    assert bulk.counts == direct.counts
    assert bulk.sum == direct.sum


def test_counts_for_other_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="3 counts"):
        Histogram((1.0, 2.0)).observe_many([1], 1.0)


@given(st.text(), st.text(), st.floats(allow_nan=False))
def test_any_label_value_and_number_can_be_read_back(help: str, label: str, value: float) -> None:
    metrics = Metrics()
    # The reference parser splits lines at every line boundary of Python; the format knows only the line feed.
    label = "".join(label.split("\r"))
    metrics.gauge("g", "".join(help.split())).labels()
    metrics.gauge("h", "H.", ("x",)).labels(label).set(value)

    lines = metrics.render_now().decode().split("\n")

    shown = label.encode("utf-8", "replace").decode()
    families = {family.name: family for family in text_string_to_metric_families("\n".join(lines[3:]))}
    sample = families["h"].samples[0]
    assert sample.labels == {"x": shown}
    assert sample.value == value


def test_half_a_surrogate_pair_in_a_label_does_not_cost_the_page() -> None:
    metrics = Metrics()
    metrics.gauge("g", "G.", ("x",)).labels("\ud800").set(1)

    assert b'g{x="?"} 1.0' in metrics.render_now()


async def test_a_rendering_is_cached_for_a_while() -> None:
    metrics = Metrics(cache_seconds=3600)
    gauge = metrics.gauge("g", "G.").labels()

    first = await metrics.render()
    gauge.set(1)
    second = await metrics.scope(worker="1").render()

    assert second is first
    assert b"g 1.0" in metrics.render_now()


async def test_a_change_that_must_show_invalidates_the_rendering() -> None:
    metrics = Metrics(cache_seconds=3600)
    gauge = metrics.gauge("g", "G.").labels()

    await metrics.render()
    gauge.set(1)
    metrics.scope(worker="1").changed()

    assert b"g 1.0" in await metrics.render()


class Slow:
    """Something among the metrics that takes until it may go on."""

    def __init__(self, metrics: Metrics) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.made = 0
        metrics.registry.register(self)  # type: ignore[arg-type]

    def collect(self) -> list[object]:
        self.made += 1
        self.begun.set()
        self.go_on.wait(10)
        return []


async def test_callers_after_a_change_share_the_next_rendering() -> None:
    metrics = Metrics(cache_seconds=3600)
    gauge = metrics.gauge("g", "G.").labels()
    slow = Slow(metrics)
    early = [asyncio.create_task(metrics.render()) for _ in range(3)]
    await asyncio.to_thread(slow.begun.wait, 10)
    gauge.set(1)
    metrics.changed()
    late = [asyncio.create_task(metrics.render()) for _ in range(3)]
    await asyncio.sleep(0)
    slow.go_on.set()

    assert len({id(await each) for each in early}) == 1
    assert len({id(await each) for each in late}) == 1
    assert b"g 1.0" in await late[0]
    assert slow.made == 2


async def test_callers_during_a_slow_rendering_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: now))
    metrics = Metrics(cache_seconds=1)
    slow = Slow(metrics)
    asking = [asyncio.create_task(metrics.render()) for _ in range(5)]
    await asyncio.to_thread(slow.begun.wait, 10)
    now = 60.0
    slow.go_on.set()
    await asyncio.gather(*asking)

    assert slow.made == 1


async def test_a_scrape_of_a_worker_shows_every_request_that_has_ended_before_it() -> None:
    metrics = Metrics(cache_seconds=3600)
    counts = WorkerMetrics(metrics.scope(worker="w"))

    pages = []
    for _ in range(2):
        counts.request()()
        pages.append(await metrics.render())

    assert b'dynamo_component_requests_total{worker="w"} 2.0' in pages[1]


async def test_without_a_cache_each_rendering_is_new() -> None:
    metrics = Metrics(cache_seconds=0)
    gauge = metrics.gauge("g", "G.").labels()

    await metrics.render()
    gauge.set(1)

    assert b"g 1.0" in await metrics.render()


async def test_callers_at_the_same_time_share_one_rendering_made_in_a_thread() -> None:
    metrics = Metrics()
    threads: list[int] = []

    class Slow:
        def collect(self) -> list[object]:
            threads.append(threading.get_ident())
            return []

    metrics.registry.register(Slow())  # type: ignore[arg-type]

    texts = await asyncio.gather(*(metrics.render() for _ in range(10)))

    assert len(set(map(id, texts))) == 1
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_children_can_be_made_and_removed_while_others_render() -> None:
    metrics = Metrics()
    family = metrics.histogram("h", "H.", ("x",), buckets=(1, 2, 3))
    done = threading.Event()
    failures: list[Exception] = []

    def render() -> None:
        try:
            while not done.is_set():
                list(text_string_to_metric_families(text_of(metrics)))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    for number in range(2000):
        family.labels(str(number % 50)).observe(number % 4)
        family.remove(str((number + 25) % 50))
    done.set()
    thread.join()

    assert failures == []
