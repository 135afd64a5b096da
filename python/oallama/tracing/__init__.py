"""Timelines of a loaded model: what every device computed and what was copied, from when to when."""

from .record import record_timeline, recorded_spans
from .timeline import LaneUse, Span, Stage, Timeline

__all__ = ["LaneUse", "Span", "Stage", "Timeline", "record_timeline", "recorded_spans"]
