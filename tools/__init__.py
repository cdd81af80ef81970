"""What this library's own tests and benchmarks examine kernels with; no part of the installed package."""
