"""The program of a run: what it computes, how its arrays are split, its FLOPs, and advice if memory is short."""
