"""Start of a run: its state, restored or newly initialized, and everything else that the loop needs."""
