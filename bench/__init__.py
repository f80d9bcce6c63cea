"""Benchmarks: every number is verified before it is timed, and compared within one run. Start with `octavo bench --help`."""
