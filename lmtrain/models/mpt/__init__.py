"""MPT (MosaicML 2023): ALiBi instead of positions, no biases, head tied to the embedding."""
