"""Where metrics go: JSON lines, TensorBoard, W&B, the terminal. A tracker that fails never stops training."""
