"""From a model file to a loaded model: planning, dry runs, what is placed where, measured times."""
