"""Stay on one host or spread over several: every way with its times, and the choice."""
