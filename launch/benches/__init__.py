"""Benchmarks, a module each: `Options`, a dataclass for the command line, and `run(options, display)`, which returns figures."""
