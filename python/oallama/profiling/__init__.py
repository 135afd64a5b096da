"""Devices, operator timings and link timings of a machine, cached by fingerprint.

`profile` is the data (no engine needed); `profiler` measures; `workload` says what to measure.
"""

from oallama.data.profile import Profile

__all__ = ["Profile"]
