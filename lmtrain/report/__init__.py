"""One HTML page about one run or several, from the files that runs write. Imports no JAX."""
