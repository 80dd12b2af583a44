"""Telemetry: metrics, traces, logs, and the accounting of client requests."""
