"""Discovery between the pods of a namespace, through the API server of Kubernetes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Discovery

DYNAMO_API = 1


@hookimpl
def dynamo_register_discovery() -> list[type[Discovery]]:
    from dynamo_plugin_discovery_kubernetes.discovery import KubernetesDiscovery

    return [KubernetesDiscovery]
