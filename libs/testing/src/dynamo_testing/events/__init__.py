"""What the checks of the event kit work with; `dynamo_testing.events_kit` holds the checks."""
