"""Latent attention (MLA): keys and values from a small latent, which is all that generation keeps of a token."""
