"""Accounting of requests, their spans, and span export."""
