"""Optimisation that knows no models: layered choices under memory limits, by several solvers."""
