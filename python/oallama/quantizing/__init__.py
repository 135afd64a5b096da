"""Types of weights: recipes, llama.cpp's quantiser, what a type costs in quality, and the search for the best types."""

from .divergence import Divergence, Reference
from .importance import DEFAULT_TYPES, GROUPINGS, Importance, Laboratory, measure_importance
from .machine import Machine
from .quantizer import Resolved, quantize, resolve
from .recipe import MIXES, OURS, Recipe, Rule, described, named
from .search import Search, Trial
from .types import TYPES, bits_per_weight

__all__ = [
    "DEFAULT_TYPES",
    "GROUPINGS",
    "MIXES",
    "OURS",
    "TYPES",
    "Divergence",
    "Importance",
    "Laboratory",
    "Machine",
    "Recipe",
    "Reference",
    "Resolved",
    "Rule",
    "Search",
    "Trial",
    "bits_per_weight",
    "described",
    "measure_importance",
    "named",
    "quantize",
    "resolve",
]
