"""Processes, timeouts and waiting: every other part of the client may use them."""
