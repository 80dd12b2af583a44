"""Rendering what `deploy/` has, with the tools that the environment has."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy" / "helm" / "dynamo"

Objects = list[dict[str, Any]]

#: Every value of the chart that adds something.
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "images.example/dynamo", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "fullnameOverride": "models",
    "config": {
        "transport": {"use": "tcp", "bind": "0.0.0.0:7200", "secret": "${env:SHARED}"},
        "client": {"drain_grace": 2.5, "shutdown_timeout": 20},
        "frontend": {"port": 8080, "processes": 2},
        "admin": {"port": 9300},
    },
    "secrets": {"SHARED": {"secret": "s", "key": "k"}},
    "networkPolicy": {
        "api": [{"ipBlock": {"cidr": "203.0.113.0/24"}}],
        "system": [{"namespaceSelector": {"matchLabels": {"a": "b"}}, "podSelector": {}}],
        "servers": [{"name": "redis", "podSelector": {"matchLabels": {"app": "redis"}}, "ports": [6379]}],
        "egress": {"enabled": True, "more": [{"ports": [{"port": 4318, "protocol": "TCP"}]}]},
    },
    "serviceAccount": {"name": "someone", "annotations": {"a": "b"}},
    "pod": {
        "annotations": {"a": "b"},
        "labels": {"team": "a"},
        "env": [{"name": "OTEL_EXPORT_ENABLED", "value": "1"}],
        "envFrom": [{"secretRef": {"name": "more"}}],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"},
    },
    "frontend": {
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
        "autoscaling": {"enabled": True, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 60}}},
    },
    "workers": {
        "a_b": {
            "config": {
                "model": {"name": "m"},
                "engine": {"use": "mocker"},
                "grace_period": 0,
                "shutdown_timeout": 7,
                "system_port": 9400,
            },
            "podDisruptionBudget": {"enabled": False},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "startupSeconds": 1800,
        },
        "c": {"config": {"model": {"name": "n"}, "engine": {"use": "mocker"}}, "replicas": 0},
    },
}

SOURCES = ("chart: mocker", "chart: nats-etcd", "chart: everything", "kustomize: base", "kustomize: nats-etcd")


class Refused(Exception):
    """The chart was not rendered; the text is what Helm says."""


def not_tested(what: str, remedy: str) -> NoReturn:
    """Skip the test, loudly; fail it where CI has promised the tool."""
    text = f"NOT TESTED: there is no {what}; {remedy}"
    if os.environ.get("CI") == "1" and sys.platform == "linux" and os.uname().machine == "x86_64":
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="session")
def library() -> Callable[[str], Any]:
    """Import a module of the development tools, or skip."""

    def load(name: str) -> Any:
        if importlib.util.find_spec(name) is None:
            not_tested(name, "see requirements-dev.txt")
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def render() -> Callable[..., dict[str, str]]:
    """Return the files of the chart by name, rendered once by Helm with these values on top of the chart's own."""

    @cache
    def text(values: str, release: str) -> str:
        if importlib.util.find_spec("helm_python") is None:
            not_tested("helm-python-sdk", "see requirements-dev.txt")
        result = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("render_chart.py")), str(CHART), release, "dynamo"],
            input=values,
            capture_output=True,
            text=True,
            timeout=90,
        )
        if result.returncode:
            raise Refused(result.stderr)
        return result.stdout

    def run(values: dict[str, Any], release: str = "dynamo") -> dict[str, str]:
        files: dict[str, str] = json.loads(text(json.dumps(values), release))
        return files

    return run


@pytest.fixture(scope="session")
def refusal(render: Callable[..., dict[str, str]]) -> Callable[[dict[str, Any]], str]:
    """Return what Helm says to values that the chart must refuse."""

    def run(values: dict[str, Any]) -> str:
        with pytest.raises(Refused) as caught:
            render(values)
        return str(caught.value)

    return run


@pytest.fixture(scope="session")
def chart(render: Callable[..., dict[str, str]]) -> Callable[..., Objects]:
    """Return the objects of the chart with these values."""

    def run(values: dict[str, Any], release: str = "dynamo") -> Objects:
        texts = [text for name, text in sorted(render(values, release).items()) if name.endswith(".yaml")]
        return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]

    return run


@pytest.fixture(scope="session")
def kustomized() -> Callable[[str], Objects]:
    """Return the objects of a folder below `deploy/kustomize`.

    No distribution brings Kustomize, so CI does not promise it.
    """
    commands = (["kustomize", "build"], ["kubectl", "kustomize"])
    command = next((words for words in commands if shutil.which(words[0])), None)

    def run(folder: str) -> Objects:
        if command is None:
            pytest.skip("NOT TESTED: there is neither kustomize nor kubectl")
        path = str(REPOSITORY / "deploy" / "kustomize" / folder)
        result = subprocess.run([*command, path], capture_output=True, text=True, timeout=30)
        assert result.returncode == 0, result.stderr
        return list(yaml.safe_load_all(result.stdout))

    return run


@pytest.fixture(scope="session")
def example() -> Callable[[str], dict[str, Any]]:
    """Return the values in `examples/helm`."""

    def read(name: str) -> dict[str, Any]:
        values: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / "helm" / f"{name}.yaml").read_text())
        return values

    return read


@pytest.fixture(scope="session")
def rendered(
    chart: Callable[..., Objects], example: Callable[[str], dict[str, Any]], kustomized: Callable[[str], Objects]
) -> Callable[[str], Objects]:
    """Return the objects of one of SOURCES, rendered once."""
    kept: dict[str, Objects] = {}

    def make(source: str) -> Objects:
        tool, name = source.split(": ")
        if tool == "kustomize":
            return kustomized(name if name == "base" else f"overlays/{name}")
        return chart(EVERYTHING if name == "everything" else example(name))

    def get(source: str) -> Objects:
        if source not in kept:
            kept[source] = make(source)
        return kept[source]

    return get


@pytest.fixture(params=SOURCES)
def objects(request: pytest.FixtureRequest, rendered: Callable[[str], Objects]) -> Objects:
    return rendered(request.param)
