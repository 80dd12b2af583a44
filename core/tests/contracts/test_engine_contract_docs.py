"""Holds `docs/reference/engine-contract.md` to the contract: nothing is missing, nothing is invented."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import dynamo_core
import pytest
from dynamo_core import BackendError, EngineConfig, EngineContext, GenerateContext, LLMEngine, WorkerConfig
from dynamo_core.contracts.engine import RuntimeOptions
from dynamo_core.protocol import output, request
from dynamo_runtime.args import TAKEN
from dynamo_runtime.settings import FLAGS

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "engine-contract.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    section = re.split(rf"^#+ {re.escape(heading)}$", PAGE, flags=re.MULTILINE)[1]
    lines = re.split(r"^#+ ", section, flags=re.MULTILINE)[0].split("| --- |", 1)[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)[`(]", cell)


def first_column(heading: str) -> set[str]:
    return {name for row in table(heading) for name in names(row[0])}


def test_every_method_of_an_engine_is_described() -> None:
    methods = {name for name in vars(LLMEngine) if not name.startswith("_") and callable(getattr(LLMEngine, name))}

    assert first_column("Methods") == methods - {"from_args"}


def test_every_member_of_the_contexts_is_described() -> None:
    # What a transport and a worker agree on, and what request events go by; engines have no use for them.
    internal = {"coalesce", "root_id"}
    shared = {name for name in dir(EngineContext("r")) if not name.startswith("_")} - internal
    own = {name for name in vars(GenerateContext) if not name.startswith("_")} - shared

    assert {name for row in table("Contexts") for name in names(row[0].replace("await ", ""))} == shared
    assert own == {"inner", "notify_first_token"}
    assert all(f"`{name}()`" in PAGE for name in own)


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("What the worker passes in: WorkerConfig", [field.name for field in dataclasses.fields(WorkerConfig)]),
        ("What the engine returns: EngineConfig", [field.name for field in dataclasses.fields(EngineConfig)]),
        ("The request: PreprocessedRequest", request.PreprocessedRequest.__struct_fields__),
        ("The answer: LLMEngineOutput", output.LLMEngineOutput.__struct_fields__),
    ],
)
def test_every_field_has_a_row(heading: str, known: list[str]) -> None:
    assert first_column(heading) == set(known)


@pytest.mark.parametrize(
    "struct",
    [
        request.StopConditions,
        request.SamplingOptions,
        request.GuidedDecodingOptions,
        request.OutputOptions,
        request.RoutingHints,
        request.RouterConfigOverride,
        request.PrefillResult,
        request.BootstrapInfo,
        request.TraceLink,
    ],
)
def test_every_group_of_the_request_is_listed_whole(struct: type) -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| `{struct.__name__}` |")]

    assert set(struct.__struct_fields__) <= set(names(row.split("|")[2]))  # type: ignore[attr-defined] # a Struct
    assert hasattr(dynamo_core, struct.__name__)


def test_the_options_of_run_and_the_counts_of_usage_are_named() -> None:
    for name in (
        *(field.name for field in dataclasses.fields(RuntimeOptions)),
        *output.CompletionUsage.__struct_fields__,
    ):
        assert f"`{name}`" in PAGE


def test_the_common_flags_are_listed_with_their_variables() -> None:
    variables = {flag.flag: flag.env for flag in FLAGS}
    rows = {flag: row for row in table("from_args and the common flags") for flag in re.findall(r"`(--[\w-]+)", row[0])}

    assert set(rows) == TAKEN - {"--help"}
    for flag, row in rows.items():
        if variables.get(flag):
            assert f"`{variables[flag]}`" in row[1]


def test_every_kind_of_an_engines_error_has_a_row() -> None:
    kinds = [name for name, value in vars(BackendError).items() if isinstance(value, type)]

    assert [row[0].strip("`") for row in table("Errors")] == kinds


def test_the_switch_of_the_stream_checks_is_told_with_what_it_checks() -> None:
    for word in ("serve --dev", "DYN_STREAM_VALIDATOR=1", "DYN_STREAM_VALIDATOR=0", "after the terminal"):
        assert word in PAGE
