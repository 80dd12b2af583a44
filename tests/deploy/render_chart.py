"""Renders a chart with Helm's own library: the values come as JSON on stdin, the files go as JSON to stdout.

A process of its own, because the library brings Go's runtime with its threads and signal handlers. Ends with 1 and what
Helm says if the chart refuses.
"""

from __future__ import annotations

import json
import sys

import helm_python


def main(chart: str, release: str, namespace: str) -> int:
    with helm_python.Chart.load(chart) as loaded:
        try:
            files = loaded.render(json.load(sys.stdin), name=release, namespace=namespace)
        except helm_python.HelmError as error:
            sys.stderr.write(str(error))
            return 1
    json.dump(files, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
