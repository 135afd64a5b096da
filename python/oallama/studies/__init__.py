"""Programs that measure oallama itself, and whose parts tests use; run them as modules (bench/README.md)."""
