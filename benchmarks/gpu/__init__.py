"""The rows that need a GPU: what is measured, beside whom, how it is checked and timed."""
