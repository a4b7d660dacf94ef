"""Language models in Flax Linen: one folder per family; `decoder.py`, `layers/` and `attention/` are shared."""
