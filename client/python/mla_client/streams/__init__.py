"""Streams that carry steps to a server, one module for each way that they travel."""
