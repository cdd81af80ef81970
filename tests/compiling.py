"""Imports whatever compiling kernels needs, once for all processes forked from this one."""

import importlib
import os

# Triton reads it when a kernel is decorated.
os.environ.pop("TRITON_INTERPRET", None)

import triton.backends.amd.compiler
import triton.backends.nvidia.compiler
import triton.compiler

importlib.import_module("torch._dynamo")  # which fake tensors import
importlib.import_module("tools.launches")  # imports all kernels

# A hash of all of Triton's files, which each compiling process would compute.
getattr(triton.runtime.cache, "triton_key", lambda: None)()
