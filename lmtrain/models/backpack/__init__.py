"""Backpack (Hewitt et al. 2023): word vectors in several senses, weighted by a GPT-2 that looks at the context."""
