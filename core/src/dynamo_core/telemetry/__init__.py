"""What the framework tells about itself: metrics, traces, logs, and the accounting of client requests."""
