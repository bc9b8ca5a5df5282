"""Triton kernels; the modules here need triton, and `core/fused.py` imports them where there is one."""
