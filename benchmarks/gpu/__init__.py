"""Rows that need a GPU: contenders, inputs, checks and timing."""

import record  # noqa: F401  # finds this library in a copy of the tree, where nothing is installed
