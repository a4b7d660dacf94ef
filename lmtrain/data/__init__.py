"""Token shards -> global batches. The batch at step t is a pure function of (manifest, t)."""
