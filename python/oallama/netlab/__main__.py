"""The network testbed from the command line.

Examples:
    python -m oallama.netlab check --hosts 2 --rate 1gbit --delay 0.25ms
    python -m oallama.netlab run --hosts 2 --rate 1gbit --background '1:iperf3 -s' -- iperf3 -c {1}
    python -m oallama.netlab run --hosts 2 --rate 1gbit -- mpirun -H h0:2,h1:2 --mca plm_ssh_agent {ssh} ...
    python -m oallama.netlab shell --hosts 2 --delay 2ms --loss 1%
    python -m oallama.netlab clean
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys

from oallama.netlab.conditions import Conditions, parse_rate, parse_share, parse_time
from oallama.netlab.hosts import NetLabError, clean
from oallama.netlab.lab import NetLab
from oallama.netlab.probe import Probe


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its command's exit code, 2 for a user's mistake, 130 for Ctrl-C."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else no lab would be cleaned up
    try:
        if args.action == "clean":
            return _clean()
        conditions = Conditions(
            rate_bit=parse_rate(args.rate),
            delay_s=parse_time(args.delay),
            jitter_s=parse_time(args.jitter),
            loss=parse_share(args.loss),
        )
        with NetLab(args.hosts, conditions) as lab:
            return {"shell": _shell, "run": _run, "check": _check}[args.action](lab, conditions, args)
    except (NetLabError, ValueError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("netlab: interrupted; everything is cleaned up", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="netlab", description="Hosts here behind cables of a given quality.")
    actions = parser.add_subparsers(dest="action", required=True)
    network = argparse.ArgumentParser(add_help=False)
    network.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    network.add_argument("--rate", default="unlimited", help="e.g. 1gbit (default: %(default)s)")
    network.add_argument("--delay", default="0", help="one way, e.g. 0.2ms (default: %(default)s)")
    network.add_argument("--jitter", default="0", help="delay +- this, e.g. 50us (default: %(default)s)")
    network.add_argument("--loss", default="0", help="share of the packets, e.g. 1%% (default: %(default)s)")
    actions.add_parser("shell", parents=[network], help="$SHELL in host 0")
    run = actions.add_parser(
        "run",
        parents=[network],
        help="a command in a host, then the bytes that each host sent",
        description="In commands {0}, {1}, ... stand for the hosts' addresses, {ssh} for Open MPI's plm_ssh_agent.",
    )
    run.add_argument("--on", type=int, default=0, metavar="HOST", help="default: %(default)s")
    run.add_argument(
        "--background", action="append", default=[], metavar="HOST:COMMAND", help="ends with the main command; repeat"
    )
    run.add_argument("command", nargs="+", help="after --")
    actions.add_parser("check", parents=[network], help="round trips and throughput, beside what was asked")
    actions.add_parser("clean", help="remove the labs whose owner was killed")
    return parser


def _clean() -> int:
    labs = clean()
    print(f"netlab: removed {', '.join(labs)}" if labs else "netlab: nothing to remove")
    return 0


def _shell(lab: NetLab, conditions: Conditions, args: argparse.Namespace) -> int:
    for host in range(lab.n_hosts):
        print(f"{lab.name(host)}  {lab.address(host)}")
    print(f"this is h0; a command in h1: {lab.ssh_agent()} h1 COMMAND")
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the shell
    return subprocess.call(lab.command(0, [os.environ.get("SHELL", "/bin/sh")]))


def _run(lab: NetLab, conditions: Conditions, args: argparse.Namespace) -> int:
    values = {f"{{{host}}}": lab.address(host) for host in range(lab.n_hosts)} | {"{ssh}": str(lab.ssh_agent())}

    def fill(text: str) -> str:
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    with lab.traffic() as traffic:
        for text in args.background:
            host, colon, command = text.partition(":")
            if not (host.isdecimal() and colon):
                raise ValueError(f"--background: expected HOST:COMMAND such as '1:iperf3 -s', got {text!r}")
            lab.popen(int(host), ["sh", "-c", fill(command)], stdout=sys.stderr)
        code = lab.run(args.on, [fill(word) for word in args.command]).returncode
    for host, sent in enumerate(traffic.sent):
        print(f"netlab: {lab.name(host)} sent {sent} bytes", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _check(lab: NetLab, conditions: Conditions, args: argparse.Namespace) -> int:
    asked = f"{conditions.rate_bit / 1e6:.0f}" if conditions.rate_bit else "unlimited"
    # As much as takes about a second.
    n_bytes = int(min(conditions.rate_bit or 4e9, 4e9) / 8)
    print(f"{'pair':8}  {'RTT asked':>9}  {'p50':>9}  {'p99':>9}  {'Mbit/s asked':>12}  {'TCP payload':>11}")
    for a, b in itertools.combinations(range(lab.n_hosts), 2):
        probe = Probe(lab, b)
        trips = statistics.quantiles(probe.round_trips(a, 300), n=100)
        rate = n_bytes * 8 / probe.transfer(a, n_bytes)
        times = f"{2e3 * conditions.delay_s:9.3f}  {1e3 * trips[49]:9.3f}  {1e3 * trips[98]:9.3f}"
        print(f"{lab.name(a)}-{lab.name(b):5}  {times}  {asked:>12}  {rate / 1e6:11.0f}")
    print("RTT in ms, of 64 bytes over TCP; throughput of one connection, its slow start included")
    return 0


if __name__ == "__main__":
    sys.exit(main())
