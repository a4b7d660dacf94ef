"""The training loop: steps, metrics, evaluation, checkpoints."""
