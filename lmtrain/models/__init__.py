"""Language models in Flax Linen: one folder per family, shared layers in `layers/`."""
