"""Llama (Touvron et al. 2023): rotary positions, RMS norms, gated MLP, grouped keys and values."""
