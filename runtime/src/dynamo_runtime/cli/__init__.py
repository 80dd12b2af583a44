"""The command `dynamo`. Each command is a module of its own, imported when it is run."""
