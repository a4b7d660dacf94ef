"""One HTML page about a run, or several side by side, from the files that runs leave. Knows nothing of JAX."""
