"""Observers: where events go."""
