"""What a process needs from its machine: logging, signals, files."""
