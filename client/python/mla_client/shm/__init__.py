"""Shared memory with a server on the same host: regions, command rings, waiting."""
