"""The settings of the fair queue."""

from __future__ import annotations

from typing import Annotated, ClassVar

from dynamo_core import PluginConfig
from pydantic import BaseModel, ConfigDict, Field

from dynamo_plugin_admission_fair_queue.shared_config import SharedConfig

_Tenant = Annotated[str, Field(min_length=1)]


class TenantSettings(BaseModel):
    """The limits of one tenant."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    weight: float = Field(default=1.0, gt=0, le=1000, description="Its share of the tokens, beside those of others.")
    concurrency: int | None = Field(
        default=None, ge=1, description="Requests that it may have under way at once; null means any number."
    )
    tokens_per_second: float | None = Field(
        default=None,
        gt=0,
        description="Tokens of prompts and answers that it may have a second; null means any number.",
    )
    burst_tokens: int | None = Field(
        default=None, ge=1, description="Tokens that it may save up; null means those of ten seconds."
    )


class FairQueueConfig(PluginConfig):
    """The bounds of the queue, and the limits of tenants."""

    LIVE: ClassVar[frozenset[str]] = frozenset(
        {
            "max_queue",
            "max_wait",
            "requests_per_worker",
            "headroom",
            "aging",
            "seniority",
            "tenants",
            "default_tenant",
        }
    )

    max_queue: int = Field(
        default=256, ge=0, le=100_000, description="Requests that may wait for one model; 0 refuses instead."
    )
    max_wait: float = Field(default=30.0, gt=0, le=3600, description="Seconds that a request waits at most.")
    requests_per_worker: int | None = Field(
        default=None,
        ge=1,
        description="Requests that are let in at once for each worker of a model; null leaves it to the thresholds.",
    )
    headroom: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Part of the places of `requests_per_worker` that is kept for tenants with less than their share.",
    )
    aging: float = Field(
        default=10.0, gt=0, le=3600, description="Seconds of waiting that make up for one step of priority."
    )
    seniority: float = Field(
        default=2.0,
        ge=0,
        le=3600,
        description="Seconds that each earlier refusal puts a client's next attempt before others of its tenant, "
        "for up to 5 of them.",
    )
    tenants: dict[_Tenant, TenantSettings] = Field(
        default={}, description="Weights and limits by tenant, as `auth.keys` names them."
    )
    default_tenant: TenantSettings = Field(
        default=TenantSettings(), description="Weight and limits of each tenant that is not in `tenants`."
    )
    shared: SharedConfig | None = Field(
        default=None,
        description="Where frontends tell each other what tenants have, so that limits hold over all of them; null "
        "means that they hold for each.",
    )

    def tenant(self, name: str) -> TenantSettings:
        """Return what a tenant may have."""
        return self.tenants.get(name, self.default_tenant)
