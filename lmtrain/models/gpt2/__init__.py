"""GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, GELU MLP, head tied to the embedding."""
