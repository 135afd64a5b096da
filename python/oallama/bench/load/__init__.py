"""A load generator for servers of the OpenAI API: Poisson arrivals, streamed answers, throughput at an objective."""

from .arrivals import Request, Target, schedule
from .drive import Load, Record, Run, drive
from .lengths import TRACES, Lengths, parse_lengths
from .measure import Percentiles, Slo, Summary, lags, percentiles, summarize
from .report import head, lines, summary_line, write_lines, write_plot
from .search import highest
from .service import Service, reach

__all__ = [
    "TRACES",
    "Lengths",
    "Load",
    "Percentiles",
    "Record",
    "Request",
    "Run",
    "Service",
    "Slo",
    "Summary",
    "Target",
    "drive",
    "head",
    "highest",
    "lags",
    "lines",
    "parse_lengths",
    "percentiles",
    "reach",
    "schedule",
    "summarize",
    "summary_line",
    "write_lines",
    "write_plot",
]
