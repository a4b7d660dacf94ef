"""Figures read from the text of a compiled program: products, memory traffic, communication, and a bound on speed.

XLA prints an optimized program as HLO text. `measure` in `figures.py` turns it into figures per device and execution;
each other module extracts one of them. All are pure functions of the text and import no JAX, so that they can be tested
on small programs with known figures.
"""
