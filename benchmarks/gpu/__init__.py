"""The rows that need a GPU: what is measured, beside whom, how it is checked and timed."""

import record  # noqa: F401  # finds this library in a copy of the tree, where nothing is installed
