"""Services of the machine and process: logging, signals, files, distributed start-up."""
