"""A client that comes back when it is told that all workers are busy.

    python examples/overload/client.py http://127.0.0.1:8000 MODEL "Hello" [--requests 20]

It waits as long as the server says in ``Retry-After``, and without that longer each time, never all clients at once.
Only what will pass by itself is tried again: 429, 503 and 529, unless ``x-should-retry`` is ``false``.
Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BUSY = (429, 503, 529)
LONGEST = 60.0


def pause(attempt: int, told: str | None, chance: Callable[[], float] = random.random) -> float:
    """Return seconds before the next attempt, the first of which has number 0; `told` is what ``Retry-After`` says."""
    if told is not None and told.isdigit():
        # A little more, so that clients with the same answer do not return in the same instant.
        return min(int(told) + chance(), LONGEST)
    return min(2.0**attempt + chance(), LONGEST)


def ask(url: str, body: dict[str, Any], *, attempts: int = 8, timeout: float = 600.0) -> dict[str, Any]:
    """Return the answer; wait and ask again while the server is busy.

    Raises:
        urllib.error.HTTPError: another error, or still busy after the last attempt.
    """
    data = json.dumps(body).encode()
    for attempt in range(attempts):
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - the user's own
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            hopeless = error.headers.get("x-should-retry") == "false"
            if error.code not in BUSY or hopeless or attempt == attempts - 1:
                raise
            wait = pause(attempt, error.headers.get("Retry-After"))
            error.close()
            sys.stderr.write(f"busy ({error.code}), again in {wait:.1f} s\n")
            sys.stderr.flush()
            time.sleep(wait)
    raise AssertionError("there is at least one attempt")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="where the frontend is")
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--requests", type=int, default=1, help="how many to make at once")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": options.prompt}],
        "max_tokens": options.max_tokens,
    }
    with ThreadPoolExecutor(options.requests) as pool:
        waiting = [pool.submit(ask, f"{options.url}/v1/chat/completions", body) for _ in range(options.requests)]
        for one in waiting:
            sys.stdout.write(one.result()["choices"][0]["message"]["content"] + "\n")


if __name__ == "__main__":
    main()
