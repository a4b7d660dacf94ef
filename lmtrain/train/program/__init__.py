"""The compiled program of a run: planning, memory estimate, layout of its arrays, XLA options."""
