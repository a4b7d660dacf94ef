"""The computation of one step: the train step, its state, averaging, norms and Hessian estimates."""
