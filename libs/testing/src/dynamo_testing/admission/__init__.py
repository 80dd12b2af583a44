"""The checks of `dynamo_testing.admission_kit`, by promise."""
