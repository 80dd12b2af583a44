"""What the checks of the event kit work with; `dynamo_core.testing.events_kit` holds the checks."""
