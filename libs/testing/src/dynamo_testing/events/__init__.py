"""The harness of the event kit; `dynamo_testing.events_kit` holds the checks."""
