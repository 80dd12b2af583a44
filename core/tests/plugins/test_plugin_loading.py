from __future__ import annotations

import sys
from typing import Any, Protocol

import pytest
from dynamo_core.contracts.engine import LLMEngine
from dynamo_core.errors import PluginError
from dynamo_core.plugins.loader import CONTRACTS, PluginLoader


class Site(Protocol):
    def install(self, distribution: str, entries: dict[str, str], modules: dict[str, str]) -> None: ...
    def install_echo(self, source: str = ...) -> None: ...


def refusal(kind: str, name: str) -> str:
    """Return the message with which a plugin is refused, checked to be one line."""
    with pytest.raises(PluginError) as refused:
        PluginLoader().load(kind, name)
    message = str(refused.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def test_loading_twice_returns_the_same_class_and_calls_the_hook_once(site: Site, echo: str) -> None:
    site.install_echo(
        echo.replace("return [EchoEngine]", "CALLS.append(1)\n    return [EchoEngine]") + "\nCALLS = []\n"
    )
    loader = PluginLoader()

    first, second = loader.load("engine", "echo"), loader.load("engine", "echo")

    assert first is second
    assert sys.modules["fake_engine_echo"].CALLS == [1]


def test_only_the_named_plugin_is_imported(site: Site) -> None:
    site.install_echo()
    site.install("other", {"engine-other": "fake_other"}, {"fake_other": "raise RuntimeError('imported')"})

    loader = PluginLoader()
    before = "fake_engine_echo" in sys.modules
    cls = loader.load("engine", "echo")

    assert (before, "fake_other" in sys.modules) == (False, False)
    assert issubclass(cls, LLMEngine)
    assert cls.NAME == "echo"


def test_one_distribution_may_offer_several_names_of_its_kind(site: Site, echo: str) -> None:
    source = echo.replace("[EchoEngine]", "[EchoEngine, type('Loud', (EchoEngine,), {'NAME': 'loud'})]")
    site.install("both", {"engine-echo": "fake_both", "engine-loud": "fake_both"}, {"fake_both": source})
    loader = PluginLoader()

    names = [loader.load("engine", name).NAME for name in ("echo", "loud")]

    assert names == ["echo", "loud"]


def test_a_plugin_name_may_hold_dashes(site: Site, echo: str) -> None:
    site.install("far", {"engine-far-away": "fake_far"}, {"fake_far": echo.replace('"echo"', '"far-away"')})

    assert PluginLoader().load("engine", "far-away").NAME == "far-away"


def test_a_misspelled_plugin_error_suggests_the_near_name(site: Site) -> None:
    site.install_echo()

    message = refusal("engine", "eco")

    assert message.startswith("there is no engine 'eco' (installed: echo, ")
    assert message.endswith("): did you mean 'echo'?")


def test_a_missing_plugin_error_lists_known_ones_and_the_distribution(site: Site) -> None:
    site.install_echo()

    message = refusal("engine", "zzz")

    assert message.startswith("there is no engine 'zzz' (installed: echo, ")
    assert message.endswith("): install the distribution that offers it (ours are called dynamo-plugin-engine-NAME)")


def test_the_built_in_admission_is_among_the_known_names() -> None:
    assert "none (built in)" in refusal("admission", "zzz")
    assert refusal("admission", "nnone").endswith("did you mean 'none'?")


def test_a_name_conflict_names_both_distributions(site: Site, echo: str) -> None:
    site.install_echo()
    site.install("acme-echo", {"engine-echo": "fake_acme"}, {"fake_acme": echo})

    message = refusal("engine", "echo")

    assert "dynamo-plugin-engine-echo 1.2.3" in message
    assert "acme-echo 1.2.3" in message


def test_the_same_name_in_two_kinds_is_no_conflict(site: Site, echo: str) -> None:
    site.install_echo()
    site.install("router-echo", {"router-echo": "fake_router_echo"}, {"fake_router_echo": ""})

    assert PluginLoader().load("engine", "echo").NAME == "echo"


WRAPPING = """
from dynamo_core import PluginConfig, PluginRef

class Wrapping(PluginConfig):
    then: PluginRef

"""

BROKEN: dict[str, tuple[Any, list[str]]] = {
    "an import that fails": (
        lambda _: "import no_such_package",
        ["cannot be imported", "ModuleNotFoundError", "no_such_package"],
    ),
    "an import that exits": (lambda _: "raise SystemExit(3)", ["cannot be imported", "SystemExit: 3"]),
    "a message of several lines": (lambda _: "raise RuntimeError('one\\ntwo')", ["RuntimeError: one two"]),
    "no version of the API": (lambda echo: echo.replace("DYNAMO_API = 1", ""), ["DYNAMO_API", "fake_engine_echo"]),
    "another version of the API": (
        lambda echo: echo.replace("DYNAMO_API = 1", "DYNAMO_API = 2"),
        ["made for DYNAMO_API 2", "has 1"],
    ),
    "a misspelled hook": (
        lambda echo: echo.replace("dynamo_register_engines", "dynamo_register_engine"),
        ["no hook dynamo_register_engine;", "did you mean dynamo_register_engines?"],
    ),
    "a misspelled hook beside the right one": (
        lambda echo: echo + "\n@hookimpl\ndef dynamo_engine_start(worker_id): ...\n",
        ["no hook dynamo_engine_start;", "did you mean dynamo_engine_started?"],
    ),
    "a parameter that the hook does not have": (
        lambda echo: echo + "\n@hookimpl\ndef dynamo_engine_stopped(engine): ...\n",
        ["dynamo_engine_stopped", "'engine'"],
    ),
    "a coroutine as a hook": (
        lambda echo: echo + "\n@hookimpl\nasync def dynamo_engine_stopped(worker_id): ...\n",
        ["dynamo_engine_stopped is a coroutine function"],
    ),
    "a wrapper as a hook": (
        lambda echo: echo + "\n@hookimpl(wrapper=True)\ndef dynamo_engine_stopped(worker_id):\n    yield\n",
        ["dynamo_engine_stopped is a wrapper"],
    ),
    "a hook without its marker": (
        lambda echo: echo.replace("@hookimpl", ""),
        ["does not implement dynamo_register_engines", "mark it with @hookimpl"],
    ),
    "no hook at all": (lambda _: "DYNAMO_API = 1", ["does not implement dynamo_register_engines"]),
    "a hook that raises": (
        lambda echo: echo.replace("return [EchoEngine]", "raise KeyError('cuda')"),
        ["dynamo_register_engines failed", "KeyError: 'cuda'"],
    ),
    "a class instead of a list": (
        lambda echo: echo.replace("return [EchoEngine]", "return EchoEngine"),
        ["must return a list of classes"],
    ),
    "a class of another sort": (
        lambda echo: echo.replace("class EchoEngine(LLMEngine)", "class EchoEngine"),
        ["EchoEngine is not a class made from LLMEngine"],
    ),
    "an object instead of a class": (
        lambda echo: echo.replace("return [EchoEngine]", "return [7]"),
        ["7 is not a class made from LLMEngine"],
    ),
    "another NAME": (
        lambda echo: echo.replace('NAME = "echo"', 'NAME = "ecko"'),
        ["no class with NAME = 'echo'", "it offers: ecko"],
    ),
    "one NAME twice": (
        lambda echo: echo.replace("[EchoEngine]", "[EchoEngine, type('Loud', (EchoEngine,), {})]"),
        ["EchoEngine and Loud have the same NAME 'echo'"],
    ),
    "a method that is missing": (
        lambda echo: echo.replace("async def cleanup", "async def clean_up"),
        ["EchoEngine does not define cleanup"],
    ),
    "a Config of another sort": (
        lambda echo: echo.replace('NAME = "echo"', 'NAME = "echo"\n    Config = dict'),
        ["EchoEngine.Config is not made from PluginConfig"],
    ),
    "a plugin to wrap, which only routers have": (
        lambda echo: echo.replace("class EchoEngine", f"{WRAPPING}class EchoEngine").replace(
            'NAME = "echo"', 'NAME = "echo"\n    Config = Wrapping'
        ),
        ["EchoEngine.Config.then is a PluginRef"],
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_plugin_error_names_plugin_distribution_and_cause(site: Site, echo: str, what: str) -> None:
    breaking, words = BROKEN[what]
    site.install_echo(breaking(echo))

    message = refusal("engine", "echo")

    assert message.startswith("engine 'echo' (dynamo-plugin-engine-echo 1.2.3): ")
    for word in words:
        assert word in message


def test_a_refused_plugin_raises_the_same_error_again(site: Site, echo: str) -> None:
    site.install_echo(echo.replace("dynamo_register_engines", "dynamo_register_engine"))
    loader = PluginLoader()

    messages = set()
    for _ in range(2):
        with pytest.raises(PluginError) as refused:
            loader.load("engine", "echo")
        messages.add(str(refused.value))

    assert len(messages) == 1


def test_an_entry_point_must_name_a_module(site: Site, echo: str) -> None:
    site.install("odd", {"engine-echo": "fake_odd:EchoEngine"}, {"fake_odd": echo})

    assert "must name a module, not 'fake_odd:EchoEngine'" in refusal("engine", "echo")


def test_every_kind_with_classes_has_a_contract_and_a_hook() -> None:
    loader = PluginLoader()

    for contract in CONTRACTS.values():
        assert contract.load().__name__ == contract.class_name
        assert contract.hook in loader.hooks.names()


def test_a_kind_without_classes_cannot_be_loaded() -> None:
    with pytest.raises(ValueError, match="have no class"):
        PluginLoader().load("hook", "anything")


def test_a_plugin_with_only_listeners_gets_hook_calls(site: Site) -> None:
    site.install(
        "dynamo-plugin-hook-counter",
        {"hook-counter": "fake_counter"},
        {
            "fake_counter": """
                from dynamo_core import hookimpl
                DYNAMO_API = 1
                SEEN = []
                @hookimpl
                def dynamo_engine_stopped(worker_id):
                    SEEN.append(worker_id)
            """
        },
    )
    loader = PluginLoader()

    loader.listen("counter")
    loader.hooks.announce("dynamo_engine_stopped", worker=None, worker_id=7)

    assert sys.modules["fake_counter"].SEEN == [7]


def test_a_listener_plugin_without_hooks_is_refused(site: Site) -> None:
    site.install("mute", {"hook-mute": "fake_mute"}, {"fake_mute": "DYNAMO_API = 1"})

    with pytest.raises(PluginError, match=r"hook 'mute' \(mute 1.2.3\): module fake_mute implements no hook"):
        PluginLoader().listen("mute")
