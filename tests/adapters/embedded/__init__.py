"""Tests of the embedded engine: over HTTP against a server in a thread or a process, and of the parts that compute."""
