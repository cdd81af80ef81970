"""Tools for this library's own tests and benchmarks; not part of the installed package."""
