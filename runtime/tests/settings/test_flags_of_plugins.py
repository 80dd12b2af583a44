"""Flags that a plugin declares beside its package."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Protocol

import pytest
from dynamo_runtime.settings.flag_table import FLAGS, OWN_FLAGS, Flag, read_plugin_flags, table_of

FLAG = """
[[flag]]
flag = "--router-stickiness"
env = "DYN_ROUTER_STICKINESS"
key = "router.stickiness"
type = "float"
help = "How long a conversation stays."
"""


class Site(Protocol):
    folder: Path

    def install(self, distribution: str, entries: dict[str, str], modules: dict[str, str]) -> None: ...


@pytest.fixture
def declare(site: Site) -> Path:
    """Install a router whose package cannot be imported; give the file of its flags."""
    (site.folder / "fake_sticky").mkdir()
    site.install("acme-sticky", {"router-sticky": "fake_sticky"}, {"fake_sticky/__init__": "raise RuntimeError"})
    return site.folder / "fake_sticky" / "flags.toml"


def test_flags_are_read_without_importing_the_plugin(declare: Path) -> None:
    declare.write_text(FLAG)

    table = table_of(OWN_FLAGS, read_plugin_flags())

    keys = [flag.key for flag in table]
    sticky = table[keys.index("router.stickiness")]
    assert (sticky.flag, sticky.env, sticky.type) == ("--router-stickiness", "DYN_ROUTER_STICKINESS", float)
    assert keys.index("router.stickiness") > keys.index("router.use")
    assert "fake_sticky" not in sys.modules


def test_a_name_that_is_taken_is_kept() -> None:
    mine = Flag("--router-mode", None, "router.mine", str, "Mine.")
    process = Flag(None, "DYN_CONFIG", "router.mine", str, "Mine.")

    assert table_of(OWN_FLAGS, iter([mine, process])) == OWN_FLAGS


def test_flags_of_a_package_in_a_namespace_are_read(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    package = site.folder / "fake_company" / "sticky"
    package.mkdir(parents=True)
    (package / "flags.toml").write_text(FLAG)
    site.install(
        "acme-space", {"router-sticky": "fake_company.sticky"}, {"fake_company/sticky/__init__": "raise OSError"}
    )
    # A module alone has no folder of its own.
    site.install("acme-module", {"router-alone": "fake_alone"}, {"fake_alone": "raise OSError"})
    (site.folder / "flags.toml").write_text("[[flag")

    assert "router.stickiness" in [flag.key for flag in read_plugin_flags()]
    assert caplog.text == ""


@pytest.mark.parametrize(
    "text",
    [
        "[[flag",
        "flags = []",
        '[[flag]]\nflag = "--x"',
        FLAG.replace("float", "complex"),
        FLAG.replace('"router.stickiness"', "5"),
        FLAG.replace('"--router-stickiness"', "7"),
        # The commands have options of one word.
        FLAG.replace("--router-stickiness", "--set"),
        FLAG.replace("DYN_ROUTER_STICKINESS", "HOME"),
    ],
)
def test_flags_that_cannot_be_read_are_named_and_left_out(
    declare: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    declare.write_text(text)

    found = [flag.key for flag in read_plugin_flags()]

    assert "router.overlap_score_credit" in found
    assert not any("sticki" in key for key in found)
    assert "the flags of fake_sticky cannot be read" in caplog.text


def test_the_runtime_names_no_key_of_a_plugin() -> None:
    own = {flag.key for flag in OWN_FLAGS}

    assert len(FLAGS) > len(OWN_FLAGS)
    sections = {key for key in own if re.match(r"(router|frontend|admission|discovery|transport)\.", key)}
    thresholds = {key for key in own if key.startswith("admission.active_")}
    uses = {f"{section}.use" for section in ("router", "admission", "discovery", "transport")}
    assert sections == uses | thresholds | {"frontend.host", "frontend.port"}
