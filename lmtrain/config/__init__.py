"""Turning YAML and command-line overrides into validated, immutable sections.

Nothing here imports JAX or anything slow, and nothing here knows what a setting means: the rooms do.
"""
