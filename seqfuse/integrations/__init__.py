"""Models of other libraries as seqfuse models. Nothing else in the package imports it."""
