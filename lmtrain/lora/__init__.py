"""LoRA (Hu et al. 2021): low-rank adapters on the linear layers of a frozen model."""
