"""Language models in Flax Linen: one folder per family, shared layers in `layers/`. See README.md of this folder."""
