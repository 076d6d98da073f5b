"""What several pictures need: load on a server, and a browser."""
