"""Text -> token shards. Every shard is a pure function of one input file, the tokenizer and the settings."""
