"""Training objectives, computed from hidden states and the head without the logits of an entire batch."""
