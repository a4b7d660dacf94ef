"""How well a model predicts text it was not trained on."""
