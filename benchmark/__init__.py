"""Benchmarks, one file per question; run them through `launch.sh`."""
