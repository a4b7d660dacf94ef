"""The Hugging Face ecosystem: tokenizers, weight files, the map between their names and ours. Knows no model."""
