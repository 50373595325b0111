"""Trainers that are killed at any moment, and what releases the engines that they leave: `make chaos`."""
