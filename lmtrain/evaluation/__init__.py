"""Evaluation of a model on held-out text."""
