"""Backpack (Hewitt et al. 2023): several sense vectors per token, weighted by a GPT-2 that reads the context."""
