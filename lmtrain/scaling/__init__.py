"""Ladders of small runs, the law that is fitted to their losses, and what it predicts for a large run."""
