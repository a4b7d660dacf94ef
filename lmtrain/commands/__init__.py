"""One short file per verb: put the parts together, call them, return the exit code."""
