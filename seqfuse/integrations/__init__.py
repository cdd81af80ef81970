"""Converts models of other libraries to seqfuse models. Nothing else in the package imports it."""
