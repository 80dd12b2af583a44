"""Answers: from engine output to whole bodies and streams for clients."""
