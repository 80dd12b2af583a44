from __future__ import annotations

import msgspec
from dynamo_core import PreprocessedRequest, Principal, RoutingHints
from dynamo_runtime.dispatch.execution.pipeline import with_identity
from hypothesis import given
from hypothesis import strategies as st

WORDS = st.text(max_size=10)
HINTS = st.none() | st.builds(
    RoutingHints, priority=st.none() | st.integers(-9, 9), cache_salt=st.none() | WORDS, session_id=st.none() | WORDS
)
PRINCIPALS = st.builds(
    Principal, tenant=WORDS, user=WORDS, session=WORDS, headers=st.dictionaries(WORDS, WORDS, max_size=3)
)


@given(HINTS, PRINCIPALS)
def test_identity_is_added_to_the_hints_without_changing_others(
    hints: RoutingHints | None, principal: Principal
) -> None:
    request = PreprocessedRequest(model="m", token_ids=[1], routing=hints)
    before = msgspec.to_builtins(request)

    sent = with_identity(request, principal)

    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=PreprocessedRequest).routing
    assert arrived is not None
    assert arrived.tenant == principal.tenant
    assert (arrived.user or "", arrived.headers or {}) == (principal.user, principal.headers)
    known = hints or RoutingHints()
    assert arrived.session_id == (principal.session or known.session_id)
    assert (arrived.priority, arrived.cache_salt) == (known.priority, known.cache_salt)
    # A request that is kept for another try is not written to.
    assert msgspec.to_builtins(request) == before
