"""What llama-server processes of ours are told."""
