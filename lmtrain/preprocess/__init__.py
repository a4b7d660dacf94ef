"""Preprocessing of text into token shards. A shard is a pure function of its input, the tokenizer and the settings."""
