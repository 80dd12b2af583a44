"""Several APIs on one listener."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from dynamo_core import Frontend, HttpRoute, PluginConfig
from dynamo_core.errors import ConfigError
from dynamo_runtime.assembly.api_set import api_set, apis_of, check_once
from dynamo_text import ByteTokenizer


class OneConfig(PluginConfig):
    one_path: str = "/one"


class OtherConfig(PluginConfig):
    other_path: str = "/other"
    LIVE = frozenset({"other_path"})

    def remarks(self) -> list[str]:
        return ["the other remarks"]


class One(Frontend):
    NAME = "one"
    Config: ClassVar[type[PluginConfig]] = OneConfig

    def routes(self) -> Iterable[HttpRoute]:
        return [HttpRoute("GET", self.config.one_path, handler)]  # type: ignore[attr-defined]

    def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Any:
        return ByteTokenizer()


class Other(One):
    NAME = "other"
    Config = OtherConfig

    def routes(self) -> Iterable[HttpRoute]:
        return [HttpRoute("GET", self.config.other_path, handler)]  # type: ignore[attr-defined]

    async def reconfigure(self, config: PluginConfig) -> None:
        self.config = config


async def handler(http: Any) -> Any:
    return http


APIS = api_set({"one": One, "other": Other})


class Stuck(One):
    NAME = "stuck"

    async def aclose(self) -> None:
        raise OSError("stuck")


async def test_an_api_that_fails_to_close_leaves_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def close(self: Other) -> None:
        closed.append(self.NAME)

    monkeypatch.setattr(Other, "aclose", close)
    apis = api_set({"other": Other, "stuck": Stuck})

    with pytest.raises(OSError, match="stuck"):
        await apis(apis.Config(), None).aclose()  # type: ignore[arg-type]

    assert closed == ["other"]


async def test_the_settings_of_all_are_one_and_each_takes_those_that_are_live() -> None:
    made = APIS(APIS.Config(one_path="/1", other_path="/2"), None)  # type: ignore[call-arg, arg-type]

    assert [route.path for route in made.routes()] == ["/1", "/2"]
    assert (set(APIS.Config.LIVE), made.config.remarks()) == ({"other_path"}, ["the other remarks"])
    await made.reconfigure(APIS.Config(other_path="/3"))  # type: ignore[call-arg]
    assert [route.path for route in made.routes()] == ["/1", "/3"]
    assert isinstance(made.load_tokenizer("", {}), ByteTokenizer)


def test_two_apis_that_claim_a_route_are_a_config_error() -> None:
    made = APIS(APIS.Config(one_path="/x", other_path="/x"), None)  # type: ignore[call-arg, arg-type]

    with pytest.raises(ConfigError, match="'one' and 'other' both serve GET /x: set another path"):
        list(made.routes())


def test_two_apis_that_claim_a_route_by_their_settings_are_a_config_error_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(One, "claims", classmethod(lambda cls, config: [f"GET {config.one_path}"]))

    with pytest.raises(ConfigError, match="'one' and 'other' both serve GET /one: set another path"):
        list(APIS.claims(APIS.Config()))


def test_an_api_that_claims_a_route_twice_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'one' serves GET /x twice: set another path"):
        check_once([("one", "GET /x"), ("one", "GET /x")])


class Form(One):
    """Serves the path of another API in a form of its own."""

    NAME = "form"

    def routes(self) -> Iterable[HttpRoute]:
        return [HttpRoute("GET", "/one", other_form, header="x-form")]


async def other_form(http: Any) -> Any:
    return "the other form"


async def test_route_answers_in_form_of_the_header_that_client_sends() -> None:
    apis = api_set({"form": Form, "one": One})
    [route] = apis(apis.Config(), None).routes()  # type: ignore[arg-type]
    plain: Any = SimpleNamespace(headers={})
    formed: Any = SimpleNamespace(headers={"x-form": "1"})

    answers: list[Any] = [await route.handler(plain), await route.handler(formed)]

    assert answers == [plain, "the other form"]


class Narrow(One):
    """Serves a narrow path before a wide one that fits it too."""

    def routes(self) -> Iterable[HttpRoute]:
        return [HttpRoute("GET", "/{id:.+}/ready", other_form), HttpRoute("GET", "/{id:.+}", other_form)]


class Wide(One):
    """Serves the wide path in a form of its own."""

    NAME = "wide"

    def routes(self) -> Iterable[HttpRoute]:
        return [HttpRoute("GET", "/{id:.+}", other_form, header="x-form")]


@pytest.mark.parametrize("order", [{"wide": Wide, "narrow": Narrow}, {"narrow": Narrow, "wide": Wide}])
async def test_a_form_of_another_api_hides_no_narrower_route(order: dict[str, Any]) -> None:
    apis = api_set(order)

    paths = [route.path for route in apis(apis.Config(), None).routes()]  # type: ignore[arg-type]

    assert paths == ["/{id:.+}/ready", "/{id:.+}"]


def test_a_set_of_one_api_is_that_api() -> None:
    assert api_set({"one": One}) is One
    assert (apis_of(One), apis_of(APIS)) == ((), ["one", "other"])
