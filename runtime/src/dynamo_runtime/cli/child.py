"""The entry point of a process that ``dynamo serve`` supervises.

Ctrl-C reaches the whole process group, and the supervisor passes it on, in order. So it is ignored here before anything
else is imported, which takes a while.
"""

import signal


def main() -> None:
    """Run the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from dynamo_runtime.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
