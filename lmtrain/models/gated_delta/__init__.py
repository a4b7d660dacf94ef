"""Gated DeltaNet: a mixer of positions with a state of constant size."""
