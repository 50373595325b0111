"""Engines: the HTTP driver, one dialect per server, and a real CPU engine to test against."""
