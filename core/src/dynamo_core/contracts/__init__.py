"""Contracts that plugins implement. Each has two or three required methods; anything more is a declared capability."""
