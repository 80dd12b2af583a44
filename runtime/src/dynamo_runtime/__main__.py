"""``python -m dynamo_runtime`` is the command ``dynamo``."""

from dynamo_runtime.cli.main import main

if __name__ == "__main__":
    main()
