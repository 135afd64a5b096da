"""Makes GGUF models with random weights: real architectures, real tokenizers, any size, written at disk speed."""

from .maker import make_model
from .quant_types import FILE_TYPES
from .shapes import ARCHITECTURES, OVERRIDES, SHAPES, Shape
from .sparse import make_sparse_model

__all__ = ["ARCHITECTURES", "FILE_TYPES", "OVERRIDES", "SHAPES", "Shape", "make_model", "make_sparse_model"]
