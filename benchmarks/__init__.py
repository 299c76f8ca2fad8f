"""Measurements, one question a file. Run as `python -m benchmarks.NAME`; the last line printed is JSON."""
