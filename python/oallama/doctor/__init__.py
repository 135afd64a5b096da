"""What of oallama works on this machine, what is missing, and the one command that mends it."""

from .examine import examine
from .finding import Finding

__all__ = ["Finding", "examine"]
