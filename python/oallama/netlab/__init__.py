"""A network testbed on one machine: hosts in network namespaces behind cables of a given rate, delay, jitter and loss.

For benchmarks and tests, in a checkout; needs root and /dev/net/tun. `python -m oallama.netlab` is its command line.
"""

from oallama.netlab.conditions import Conditions, Network
from oallama.netlab.hosts import NetLabError, clean, missing
from oallama.netlab.lab import NetLab, Traffic
from oallama.netlab.probe import Probe

__all__ = ["Conditions", "NetLab", "NetLabError", "Network", "Probe", "Traffic", "clean", "missing"]
