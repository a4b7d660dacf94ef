"""Mixtures of experts: in place of the MLP of a block, a router selects a few of many MLPs for each token."""
