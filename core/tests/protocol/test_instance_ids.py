"""How the id of an instance is written for people and JSON, and read back."""

from __future__ import annotations

import pytest
from dynamo_core.protocol.ids import format_instance_id, parse_instance_id


@pytest.mark.parametrize("number", [0, 7, 0xAB, 2**53 + 1, 2**63, 2**64 - 1])
def test_an_id_is_sixteen_hexadecimal_digits_and_read_back_as_text_or_number(number: int) -> None:
    text = format_instance_id(number)

    assert len(text) == 16
    assert int(text, 16) == number
    assert parse_instance_id(text) == parse_instance_id(text.upper()) == parse_instance_id(number) == number


@pytest.mark.parametrize(
    "wrong", ["", "ab", "-1", "0x0000000000000007", "g" * 16, "１" * 16, -1, 2**64, str(2**64), "7", " 000000000000007"]
)
def test_a_malformed_instance_id_is_refused(wrong: str | int) -> None:
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        parse_instance_id(wrong)
