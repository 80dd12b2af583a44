"""Wakes up at a pace until its input ends, then writes how late 99 of 100 wakings were. Run as a program."""

from __future__ import annotations

import sys
import threading
import time


def main() -> None:
    """Wake up at the pace that the command line gives in seconds."""
    pace = float(sys.argv[1])
    over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    late: list[float] = []
    due = time.monotonic()
    while not over.is_set():
        due += pace
        time.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        late.append(now - due)
        due = max(due, now - pace)
    sys.stdout.write(f"{sorted(late)[int(len(late) * 0.99)]}\n")


if __name__ == "__main__":
    main()
