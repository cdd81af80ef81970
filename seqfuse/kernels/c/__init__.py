"""C kernels for a CPU, printed from the same chains and device functions as the Triton kernels.

`trace` writes down what a device function does; `chain`, `norm` and others put that into loops; `call` runs what
`seqfuse.compiler` makes of the text. A kernel depends on steps and dtypes alone: shapes, strides, and the numbers of
dropout and constant factors are arguments.
"""
