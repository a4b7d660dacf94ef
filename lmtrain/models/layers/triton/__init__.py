"""Attention kernels for NVIDIA GPUs; `attention.py` is the entry point."""
