"""YAML and command-line overrides, loaded into validated, immutable sections.

Nothing here imports JAX or anything slow. What a setting means is defined in the package that reads it.
"""
