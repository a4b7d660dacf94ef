"""MPT (MosaicML 2023): ALiBi instead of position embeddings, no biases, head tied to the embedding."""
