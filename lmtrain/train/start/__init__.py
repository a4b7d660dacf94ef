"""How a run starts: its state, restored or fresh, and all that the loop needs."""
