"""Global batches from token shards. The batch at step t is a pure function of (manifest, seed, t)."""
