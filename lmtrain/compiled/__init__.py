"""Figures read from the text of a compiled program: products, memory traffic, communication, and a bound on speed.

XLA prints an optimized program as HLO text. `measure` in `figures.py` turns it into numbers per device and execution;
the other modules each read one thing. All are pure functions of the text and import no JAX, so that they are tested on
small programs whose figures are known by hand.
"""
