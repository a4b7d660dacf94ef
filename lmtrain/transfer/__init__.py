"""Transfer of learning rates and initial values from a small model to a larger one (muP, CompleteP)."""
