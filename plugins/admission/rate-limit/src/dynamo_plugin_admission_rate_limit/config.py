"""The settings of the limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from dynamo_core import PluginConfig, SettingsMismatch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dynamo_plugin_admission_rate_limit.shared_config import SharedConfig

Dimension = Literal["key", "tenant", "model", "user"]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _distinct(value: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    if len(set(value)) < len(value):
        raise ValueError("names something twice")
    return value


_By = Annotated[tuple[Dimension, ...], BeforeValidator(_listed), AfterValidator(_distinct)]
_Names = Annotated[frozenset[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class LimitSettings(BaseModel):
    """The key that clients are counted by, and the limits of each."""

    by: _By = Field(
        default=("key",),
        description="What has the limits: each `key`, `tenant`, `model` or `user`, or each combination of a list of "
        "them; [] means all requests together.",
    )
    requests_per_minute: float | None = Field(
        default=None, gt=0, le=1e9, description="Requests a minute; null means any number."
    )
    tokens_per_minute: float | None = Field(
        default=None, gt=0, le=1e12, description="Tokens of prompts and answers a minute; null means any number."
    )
    concurrent_requests: int | None = Field(
        default=None, ge=1, description="Requests under way at once; null means any number."
    )
    burst_requests: int | None = Field(
        default=None, ge=1, description="Requests that may be saved up; null means those of a minute."
    )
    burst_tokens: int | None = Field(
        default=None, ge=1, description="Tokens that may be saved up; null means those of a minute."
    )

    @model_validator(mode="after")
    def _bursts_have_a_rate(self) -> Self:
        for what in ("requests", "tokens"):
            if getattr(self, f"burst_{what}") is not None and getattr(self, f"{what}_per_minute") is None:
                raise SettingsMismatch(f"`burst_{what}` needs `{what}_per_minute`")
        return self

    @property
    def limits_something(self) -> bool:
        """Whether there is any limit."""
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests) != (None, None, None)


class RuleSettings(LimitSettings):
    """One rule of several, and the requests to which it applies."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.+-]{1,64}$",
        description="What metrics call the rule; null means the words of `by`.",
    )
    keys: _Names | None = Field(default=None, description="Only requests with these ids of `auth.keys`; null: all.")
    tenants: _Names | None = Field(default=None, description="Only requests of these tenants; null: all.")
    models: _Names | None = Field(default=None, description="Only requests for these models; null: all.")

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if not self.limits_something:
            raise SettingsMismatch(
                "limits nothing: set `requests_per_minute`, `tokens_per_minute` or `concurrent_requests`"
            )
        return self

    @property
    def label(self) -> str:
        """The name of the rule."""
        return self.name or "+".join(self.by) or "all"


class RateLimitConfig(LimitSettings, PluginConfig):
    """One rule for all requests, further rules, and where the counts are kept."""

    LIVE: ClassVar[frozenset[str]] = frozenset({*LimitSettings.model_fields, "limits"})

    limits: tuple[RuleSettings, ...] = Field(
        default=(), max_length=64, description="Further rules. A request must be within all that apply to it."
    )
    shared: SharedConfig | None = Field(
        default=None,
        description="The Redis server that counts for all frontends; null means that limits hold for each.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        twice = [name for name, count in Counter(rule.label for rule in self.rules()).items() if count > 1]
        if twice:
            raise SettingsMismatch(f"two rules are called {twice[0]}: set `name` in `limits`")
        return self

    def rules(self) -> Iterator[RuleSettings]:
        """Yield all rules, that of the section itself first."""
        if self.limits_something:
            yield RuleSettings.model_validate({name: getattr(self, name) for name in LimitSettings.model_fields})
        yield from self.limits

    def remarks(self) -> list[str]:
        """Return a remark if nothing is limited."""
        if any(self.rules()):
            return []
        return ["admission rate-limit limits nothing: set `requests_per_minute`, or rules in `limits`."]
