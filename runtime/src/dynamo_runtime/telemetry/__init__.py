"""Accounting of requests, their spans, and the export of these."""
