"""Optimizers and learning-rate schedules: small pure functions, combined according to a config."""
