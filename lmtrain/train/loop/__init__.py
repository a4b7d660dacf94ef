"""What happens at each step: training, metrics, evaluation, checkpoints."""
