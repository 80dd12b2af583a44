"""What clients say of their patience and of earlier attempts comes with who they are."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.test_utils import make_mocked_request
from dynamo_core.contracts.requests.principal import Principal
from dynamo_http.request_identity import PRINCIPAL, principal_of


def told(**headers: str) -> Principal:
    request = make_mocked_request("POST", "/", headers={name.replace("_", "-"): told for name, told in headers.items()})
    request[PRINCIPAL] = Principal(key_id="k", tenant="t")
    return principal_of(request)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"X_Stainless_Timeout": "600"}, 600),
        ({"X_Stainless_Read_Timeout": "2.5"}, 2.5),
        ({"X_Stainless_Read_Timeout": "2.5", "X_Stainless_Timeout": "60"}, 60),
    ],
)
async def test_the_timeout_of_the_official_sdks_is_a_deadline(headers: dict[str, str], seconds: float) -> None:
    now = asyncio.get_running_loop().time()

    principal = told(**headers)

    assert (principal.key_id, principal.tenant) == ("k", "t")
    assert principal.deadline is not None
    assert now + seconds <= principal.deadline < now + seconds + 5


@pytest.mark.parametrize("value", ["", "NOT_GIVEN", "nan", "inf", "-1", "None", "1_0_"])
async def test_an_invalid_timeout_header_sets_no_deadline(value: str) -> None:
    assert told(X_Stainless_Timeout=value) == Principal(key_id="k", tenant="t")


@pytest.mark.parametrize(("value", "retries"), [("0", 0), ("2", 2), ("x", 0), ("-3", 0), ("1e400", 0)])
async def test_the_retry_count_header_is_read(value: str, retries: int) -> None:
    assert told(X_Stainless_Retry_Count=value).retries == retries
