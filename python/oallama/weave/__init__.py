"""Attention of one model's sequences in another model's process (csrc/weave; docs/sources.md, 4)."""

from .channel import Receiver, Sender, SequenceRows, channel_path, guest_stats, guests, remove_abandoned

__all__ = ["Receiver", "Sender", "SequenceRows", "channel_path", "guest_stats", "guests", "remove_abandoned"]
