"""What training minimizes, computed from hidden states and the head without the logits of a whole batch."""
