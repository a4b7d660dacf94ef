"""Optimizers and learning-rate schedules: small pure parts, put together from a config."""
