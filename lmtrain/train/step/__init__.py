"""What a step computes: the train step, its state, losses and Hessians."""
