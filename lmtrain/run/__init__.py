"""What a run is, without JAX: its settings and its identity."""
