"""Definition of a run, without JAX: its settings and its identity."""
