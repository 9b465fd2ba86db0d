"""Triton kernels: one idea a file, with its math, shapes and tiling, and a function that launches it.

A kernel takes tensors and numbers and knows nothing of the engine, so that it can be read, tested and measured alone.
Importing this package needs nothing; importing a module of it needs Triton, which comes with torch for CUDA. So only
what runs on a device imports one, and no sooner than it knows that there is a device.

How kernels are tested without a device: docs/adr/0033-triton-kernels.md.
"""
