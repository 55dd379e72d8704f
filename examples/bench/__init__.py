"""Benchmarks: each prints what it measures and on what."""
