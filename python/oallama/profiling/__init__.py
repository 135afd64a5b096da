"""Devices, operator timings and link timings of a machine, cached by fingerprint.

`profiler` measures, `recorder` keeps, `workload` says what to measure; the data is `oallama.data.profile`.
"""

from oallama.data.profile import Profile

__all__ = ["Profile"]
