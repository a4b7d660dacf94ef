"""Sampling text from a model, with a KV cache."""
