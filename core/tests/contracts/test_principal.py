from __future__ import annotations

from dynamo_core import Phase, PreprocessedRequest, Principal, RoutingRequest
from hypothesis import given
from hypothesis import strategies as st

WORDS = st.text(max_size=10)


@given(WORDS, WORDS, WORDS, WORDS)
def test_the_user_and_session_of_a_request_override_known_ones(
    user: str, session: str, new_user: str, new_session: str
) -> None:
    known = Principal(key_id="k", tenant="t", user=user, session=session, headers={"x-team": "a"})

    asking = known.with_end_user(user=new_user, session=new_session)

    assert (asking.user, asking.session) == (new_user or user, new_session or session)
    assert (asking.key_id, asking.tenant, asking.headers) == ("k", "t", {"x-team": "a"})


def test_a_request_without_new_identity_makes_no_copy() -> None:
    known = Principal(user="u", session="s")

    assert known.with_end_user() is known
    assert known.with_end_user(user="u", session="s") is known


def test_repr_omits_client_supplied_identity() -> None:
    shown = repr(Principal(key_id="k", tenant="t", user="mallory", session="dark", headers={"x-team": "secret"}))

    assert "tenant='t'" in shown
    assert not any(word in shown for word in ("mallory", "dark", "secret", "x-team"))


def test_a_principal_is_hashable_with_any_headers() -> None:
    assert len({Principal(headers={"x": "1"}), Principal(headers={"x": "2"}), Principal()}) == 3


def test_every_phase_of_a_request_is_routed_for_the_same_principal() -> None:
    request = PreprocessedRequest(token_ids=[1])
    principal = Principal(session="s")

    assert RoutingRequest(request, "r").principal == Principal()
    further = RoutingRequest(request, "r", principal=principal).in_phase(Phase.DECODE, request)
    assert further.principal is principal
