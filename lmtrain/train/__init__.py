"""The training engine: a pure step, a loop that reads top to bottom, and a setup that assembles the parts."""
