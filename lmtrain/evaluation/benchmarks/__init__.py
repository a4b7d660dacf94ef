"""Benchmarks by EleutherAI's lm-eval (the LM Evaluation Harness), on the model as it is trained."""
