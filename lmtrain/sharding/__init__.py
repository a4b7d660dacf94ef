"""Sharding: logical axis names, the device mesh, and the mappings between them."""
