"""One short file per command: put the parts together, call them, return the exit code."""
