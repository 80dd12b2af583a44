"""The accounting against a model that works everything out anew, and what becomes of old requests."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_plugin_router_slot_tracker.errors import Conflict, Full, Malformed, Refusal, Unknown
from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.schemas import Addition, Projection, Registration, RequestKey, Unregistration
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plugins.conftest import Clock

MODELS, TENANTS, WORKERS = ("m", "n"), ("default", "t"), (1, 2)


def worker(worker_id: int = 1, model: str = "m", tenant: str = "default", **facts: int) -> Registration:
    sizes = {"block_size": 16, "dp_start": 0, "dp_size": 1} | facts
    return Registration(worker_id=worker_id, model_name=model, tenant_id=tenant, **sizes)


def addition(
    request_id: str, hashes: list[int], tokens: int = 0, rank: tuple[int, int] = (1, 0), **key: Any
) -> Addition:
    where: dict[str, Any] = {"worker_id": rank[0], "dp_rank": rank[1]}
    return Addition(
        **({"model_name": "m"} | key), **where, request_id=request_id, sequence_hashes=hashes, new_isl_tokens=tokens
    )


def key_of(request_id: str, model: str = "m", tenant: str = "default") -> RequestKey:
    return RequestKey(model_name=model, tenant_id=tenant, request_id=request_id)


def common(one: list[int], other: list[int]) -> int:
    """Return with how many equal numbers both begin."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


class Reference:
    """Lists only. A request is its rank, its hashes without repeats, what is left to prefill, and when it came."""

    def __init__(self) -> None:
        self.workers: dict[tuple[str, str, int], Registration] = {}
        self.active: dict[tuple[str, str, str], tuple[tuple[int, int], list[int], int, float]] = {}

    def has(self, model: str, tenant: str) -> bool:
        return any(key[:2] == (model, tenant) for key in self.workers)

    def ranks(self, model: str, tenant: str) -> list[tuple[int, int]]:
        return sorted(
            (one.worker_id, rank)
            for key, one in self.workers.items()
            if key[:2] == (model, tenant)
            for rank in range(one.dp_start, one.dp_start + one.dp_size)
        )

    def on(self, model: str, tenant: str, rank: tuple[int, int]) -> list[tuple[list[int], int]]:
        return [
            (hashes, tokens)
            for key, (where, hashes, tokens, _) in self.active.items()
            if key[:2] == (model, tenant) and where == rank
        ]

    def load(self, model: str, tenant: str, rank: tuple[int, int]) -> tuple[int, int, int]:
        here = self.on(model, tenant, rank)
        blocks = {value for hashes, _ in here for value in hashes}
        return sum(tokens for _, tokens in here), len(blocks), len(here)

    def potential(self, model: str, tenant: str, rank: tuple[int, int], query: list[int]) -> int:
        query = list(dict.fromkeys(query))
        shared = max((common(query, hashes) for hashes, _ in self.on(model, tenant, rank)), default=0)
        return self.load(model, tenant, rank)[1] + len(query) - shared

    def forget(self, before: float) -> None:
        self.active = {key: entry for key, entry in self.active.items() if entry[3] >= before}


models, tenants, worker_ids = st.sampled_from(MODELS), st.sampled_from(TENANTS), st.sampled_from(WORKERS)
request_ids = st.sampled_from([f"r{number}" for number in range(6)])
hash_lists = st.lists(st.sampled_from([-2, -1, 1, 2, 3, 2**63 - 1]), max_size=6)
dp_ranks = st.integers(0, 2)
tokens = st.sampled_from([0, 1, 48])


class RegistryModel(RuleBasedStateMachine):
    """Every call, in any order, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.registry = Registry(clock=self.clock)
        self.reference = Reference()
        self.swept = self.clock.now

    def arrive(self) -> None:
        """Do the sweep that is due."""
        if self.clock.now >= self.swept + 30:
            self.swept = self.clock.now
            self.reference.forget(self.clock.now - 300)

    @rule(
        model=models,
        tenant=tenants,
        worker_id=worker_ids,
        size=st.sampled_from([16, 16, 16, 32]),
        ranks=st.integers(0, 2),
    )
    def register(self, model: str, tenant: str, worker_id: int, size: int, ranks: int) -> None:
        one = worker(worker_id, model, tenant, block_size=size, dp_size=ranks)
        sizes = {other.block_size for key, other in self.reference.workers.items() if key[:2] == (model, tenant)}
        key = (model, tenant, worker_id)
        if ranks == 0:
            with pytest.raises(Malformed):
                self.registry.register(one)
        elif sizes - {size} or key in self.reference.workers:
            with pytest.raises(Conflict):
                self.registry.register(one)
        else:
            self.registry.register(one)
            self.reference.workers[key] = one

    @rule(model=models, tenant=tenants, worker_id=worker_ids)
    def unregister(self, model: str, tenant: str, worker_id: int) -> None:
        known = self.reference.workers.pop((model, tenant, worker_id), None)
        gone = Unregistration(worker_id=worker_id, model_name=model, tenant_id=tenant)
        if known is None:
            with pytest.raises(Unknown):
                self.registry.unregister(gone)
            return
        self.registry.unregister(gone)
        self.reference.active = {
            key: entry
            for key, entry in self.reference.active.items()
            if not (key[:2] == (model, tenant) and entry[0][0] == worker_id)
        }

    @rule(
        model=models,
        tenant=tenants,
        worker_id=worker_ids,
        rank=dp_ranks,
        request=request_ids,
        hashes=hash_lists,
        new=tokens,
    )
    def add(
        self, model: str, tenant: str, worker_id: int, rank: int, request: str, hashes: list[int], new: int
    ) -> None:
        one = addition(request, hashes, new, (worker_id, rank), model_name=model, tenant_id=tenant)
        expected: type[Refusal] | None = None
        self.arrive()
        key = (model, tenant, request)
        if (worker_id, rank) not in self.reference.ranks(model, tenant):
            expected = Unknown
        elif key in self.reference.active:
            expected = Conflict
        if expected is not None:
            with pytest.raises(expected):
                self.registry.add(one)
            return
        assert self.registry.add(one) in (16, 32)
        self.reference.active[key] = ((worker_id, rank), list(dict.fromkeys(hashes)), new, self.clock.now)

    @rule(model=models, tenant=tenants, request=request_ids)
    def complete_prefill(self, model: str, tenant: str, request: str) -> None:
        self.arrive()
        entry = self.reference.active.get((model, tenant, request))
        if entry is None:
            with pytest.raises(Unknown):
                self.registry.complete_prefill(key_of(request, model, tenant))
            return
        self.registry.complete_prefill(key_of(request, model, tenant))
        self.reference.active[model, tenant, request] = (entry[0], entry[1], 0, entry[3])

    @rule(model=models, tenant=tenants, request=request_ids)
    def free(self, model: str, tenant: str, request: str) -> None:
        self.arrive()
        if not self.reference.has(model, tenant):
            with pytest.raises(Unknown):
                self.registry.free(key_of(request, model, tenant))
            return
        known = self.reference.active.pop((model, tenant, request), None)
        freed = self.registry.free(key_of(request, model, tenant))
        assert (freed is None) == (known is None)

    @rule(model=models, tenant=tenants, hashes=hash_lists, new=tokens)
    def project(self, model: str, tenant: str, hashes: list[int], new: int) -> None:
        self.arrive()
        query = Projection(model_name=model, tenant_id=tenant, sequence_hashes=hashes, new_isl_tokens=new)
        if not self.reference.has(model, tenant):
            with pytest.raises(Unknown):
                self.registry.potential_loads(query)
            return
        loads = {(one.worker_id, one.dp_rank): one for one in self.registry.potential_loads(query)}
        assert sorted(loads) == self.reference.ranks(model, tenant)
        for rank, load in loads.items():
            prefill, _, active = self.reference.load(model, tenant, rank)
            assert load.potential_prefill_tokens == prefill + new
            assert load.potential_decode_blocks == self.reference.potential(model, tenant, rank, hashes)
            assert load.active_requests == active

    @rule(seconds=st.sampled_from([1.0, 29.0, 31.0, 120.0, 301.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.reference.active)
    @rule()
    def a_snapshot_gives_the_same(self) -> None:
        self.arrive()
        self.registry.loads()
        other = Registry(clock=self.clock)
        for one in self.registry.workers():
            other.register(one)

        assert other.restore(self.registry.held()) == len(self.reference.active)

        assert other.loads() == self.registry.loads()

    @invariant()
    def loads_are_those_of_the_requests(self) -> None:
        self.arrive()
        loads = self.registry.loads()
        shown = {
            (one.model_name, one.tenant_id, one.worker_id, one.dp_rank): (
                one.active_prefill_tokens,
                one.active_decode_blocks,
            )
            for one in loads
        }
        assert list(shown) == sorted(shown)
        assert shown == {
            (model, tenant, *rank): self.reference.load(model, tenant, rank)[:2]
            for model in MODELS
            for tenant in TENANTS
            for rank in self.reference.ranks(model, tenant)
        }

    def teardown(self) -> None:
        for model, tenant, request in self.reference.active:
            self.registry.free(key_of(request, model, tenant))
        for _, scope in self.registry.scopes():
            assert not scope.requests
            for rank in scope.ranks.values():
                assert (rank.active.blocks, rank.active.requests, rank.active.prefill_tokens) == (0, 0, 0)
                assert not rank.active._prefixes
                assert not rank.active._keys


TestRegistry = RegistryModel.TestCase


def test_a_request_expires_after_five_minutes_and_at_most_one_sweep() -> None:
    clock = Clock()
    registry = Registry(clock=clock)
    registry.register(worker())
    registry.add(addition("old", [1, 2], 5))
    clock.now += 100
    registry.add(addition("younger", [2, 3], 7))

    def load() -> tuple[int, int]:
        [load] = registry.loads()
        return load.active_prefill_tokens, load.active_decode_blocks

    clock.now = 1000 + 299.9
    assert load() == (12, 3)
    clock.now = 1000 + 330
    assert load() == (7, 2)
    assert registry.expired == 1
    clock.now = 1000 + 430
    assert load() == (0, 0)
    assert registry.add(addition("old", [1])) == 16


def test_prefill_completion_does_not_make_a_request_younger() -> None:
    clock = Clock()
    registry = Registry(clock=clock)
    registry.register(worker())
    registry.add(addition("r", [1], 5))
    clock.now += 299
    registry.complete_prefill(key_of("r"))
    clock.now += 2

    assert registry.sweep() == 1
    assert registry.sweep() == 0


def test_a_request_of_a_snapshot_is_as_old_as_it_was() -> None:
    clock = Clock()
    first = Registry(clock=clock)
    first.register(worker())
    first.add(addition("old", [1]))
    clock.now += 200
    first.add(addition("young", [2]))
    second = Registry(clock=clock)
    second.register(worker())
    second.restore(reversed(list(first.held())))

    clock.now += 101

    assert second.sweep() == 1
    assert list(second.scope("m", "default").requests) == ["young"]


def test_the_sweep_interval_never_exceeds_the_expiry() -> None:
    assert Registry(expiry=2).sweep_interval == 2
    assert Registry(expiry=3000).sweep_interval == 30


def test_ranks_are_bounded_and_room_comes_back() -> None:
    registry = Registry(max_ranks=4)
    registry.register(worker(1, dp_size=3))

    with pytest.raises(Malformed, match="dp_size 2 is too large: at most 4 ranks can be tracked, and 3 are"):
        registry.register(worker(2, dp_size=2))

    registry.unregister(Unregistration(worker_id=1, model_name="m"))
    registry.register(worker(2, dp_size=4))


def test_hashes_of_a_request_are_bounded() -> None:
    registry = Registry(max_hashes=3)
    registry.register(worker())
    says = "sequence_hashes has 4 entries: at most 3 are taken"

    with pytest.raises(Malformed, match=says):
        registry.add(addition("r", [1, 2, 3, 4]))
    with pytest.raises(Malformed, match=says):
        registry.potential_loads(Projection(model_name="m", sequence_hashes=[1] * 4))

    assert registry.add(addition("r", [1, 2, 3])) == 16
    # A snapshot of a service with wider bounds.
    wide = Registry()
    wide.register(worker())
    wide.add(addition("s", [1, 2, 3, 4]))
    assert registry.restore(wide.held()) == 0
    assert [load.active_decode_blocks for load in registry.loads()] == [3]


def test_trackers_are_bounded_and_room_comes_back() -> None:
    registry = Registry(max_trackers=2)
    registry.register(worker(1, tenant="a"))
    registry.register(worker(1, tenant="b"))

    with pytest.raises(Malformed, match="at most 2 pairs of model and tenant can be tracked"):
        registry.register(worker(1, tenant="c"))
    with pytest.raises(Malformed, match="at most 2 pairs of model and tenant can be tracked"):
        registry.register(worker(1, model="n", tenant="a"))
    # Another worker of a pair that is there needs no room.
    registry.register(worker(2, tenant="a"))

    registry.unregister(Unregistration(worker_id=1, model_name="m", tenant_id="b"))
    registry.register(worker(1, tenant="c"))
    assert {key for key, _ in registry.scopes()} == {("m", "a"), ("m", "c")}


def test_a_tenant_holds_as_much_as_it_leaves_free() -> None:
    registry = Registry(max_held=200)
    for tenant in ("a", "b"):
        registry.register(worker(tenant=tenant))
        registry.register(worker(2, tenant=tenant))

    def add(request_id: str, tenant: str, rank: tuple[int, int] = (1, 0)) -> None:
        registry.add(addition(request_id, list(range(46)), rank=rank, tenant_id=tenant))

    add("1", "a")
    add("2", "a", (2, 0))
    with pytest.raises(Full, match="tenant_id=a holds 100 hashes, and 100 of 200 are free"):
        add("3", "a")
    # That leaves a share for each of the others.
    add("1", "b")
    with pytest.raises(Full):
        add("2", "b")

    registry.free(key_of("1", tenant="a"))
    registry.unregister(Unregistration(worker_id=2, model_name="m", tenant_id="a"))
    add("2", "b")
    registry.unregister(Unregistration(worker_id=1, model_name="m", tenant_id="b"))
    registry.unregister(Unregistration(worker_id=2, model_name="m", tenant_id="b"))
    add("1", "a")
    add("2", "a")


def test_expiry_makes_room() -> None:
    clock = Clock()
    registry = Registry(clock=clock, max_held=100)
    registry.register(worker())
    registry.add(addition("1", list(range(46))))
    with pytest.raises(Full):
        registry.add(addition("2", []))

    clock.now += 400

    registry.add(addition("2", list(range(46))))


def test_names_are_bounded() -> None:
    registry = Registry()
    registry.register(worker())

    for call in (
        lambda: registry.register(worker(model="m" * 1025)),
        lambda: registry.register(worker(tenant="t" * 1025)),
        lambda: registry.add(addition("r" * 1025, [])),
    ):
        with pytest.raises(Malformed, match="has 1025 characters: at most 1024 are taken"):
            call()
