"""Hugging Face interoperability: tokenizers, weight files, Hub, and the mapping of weight names. Imports no model."""
