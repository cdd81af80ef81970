"""C kernels for CPUs, generated from the same chains and device functions as the Triton kernels.

`trace` translates device functions; `chain`, `norm` and others put them into loops; `call` runs the function that
`seqfuse.compiler` compiles. A kernel depends only on steps and dtypes: shapes, strides, and the numbers of dropout and
constant factors are arguments.
"""
