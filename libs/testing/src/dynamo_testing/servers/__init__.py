"""Servers that tests start on the loopback: processes, ports, certificates, a Redis, and a collector of OTLP."""
