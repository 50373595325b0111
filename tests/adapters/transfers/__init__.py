"""Tests of the weight transfers."""
