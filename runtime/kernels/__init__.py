"""Triton kernels, imported lazily: nothing here is needed on the CPU."""
