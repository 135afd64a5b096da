"""What knows nothing of models: child processes, JSON files, arrays."""
