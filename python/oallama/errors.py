"""The errors a user can cause. The CLI prints them as one line and exits with 2."""


class OallamaError(ValueError):
    """A user's mistake: the message names what was expected, what came, and the remedy."""
