"""A network of hosts on this machine: namespaces with hostnames of their own, joined by a switch whose cables have a
rate, a delay, jitter and loss.

Every host has one device, eth0, with an address in `network` and no other way out; h0, h1, ... resolve to the
addresses. On leaving the `with` block every process of the lab is dead and nothing is left behind; if the owner was
killed instead, `python -m oallama.netlab clean` does the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oallama.netlab import hosts
from oallama.netlab.conditions import Conditions, Network
from oallama.netlab.hosts import NetLabError
from oallama.netlab.relay import Relay, build, sources

MAX_HOSTS = 250
# What `tc` calls the length of a frame lacks the overhead of all but the first packet in it: of the cable's rate a host
# may offer this much, else packets pile up in the relay instead of holding their senders back.
_OFFERED = 0.984


@dataclass
class Traffic:
    """Bytes that each host sent during a `NetLab.traffic` block; empty until it ends."""

    sent: list[int] = field(default_factory=list)


class NetLab:
    """Hosts 0 to n_hosts - 1 under the given conditions, between `__enter__` and `__exit__`.

    Args:
        n_hosts: 1 to 250.
        conditions: of all hosts, or a mapping from hosts and (from, to) pairs; a host that is not named has no limits.
        cpus: the CPUs of each host as `taskset -c` takes them; default: all hosts share this machine's.

    Raises ValueError for a host that is not there, and, on entry, NetLabError where no lab can be made.

    Example:
        with NetLab(2, Conditions(rate_bit=1e9, delay_s=0.2e-3)) as lab:
            server = lab.popen(1, ["iperf3", "-s"])
            lab.run(0, ["iperf3", "-c", lab.address(1)], check=True)
            print(lab.sent(0))
    """

    network = "10.77.0.0/24"

    def __init__(
        self,
        n_hosts: int,
        conditions: Network = Conditions(),  # noqa: B008 (it is frozen)
        cpus: Sequence[str] = (),
    ) -> None:
        if not 1 <= n_hosts <= MAX_HOSTS:
            raise ValueError(f"n_hosts: expected 1 to {MAX_HOSTS}, got {n_hosts!r}")
        if cpus and len(cpus) != n_hosts:
            raise ValueError(f"cpus: expected one entry for each of {n_hosts} hosts, got {len(cpus)}")
        self.n_hosts = n_hosts
        self._cpus = tuple(cpus)
        self._conditions: dict[int | tuple[int, int], Conditions] = {}
        self._note(conditions)
        self.id = ""  # what its namespaces start with
        self._owned: int | None = None  # the lock
        self._relay: Relay | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> NetLab:
        if reason := hosts.missing():
            raise NetLabError(reason)
        build()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs in the lab and remove it; a second call does nothing."""
        # A Ctrl-C meanwhile is delivered when all is done.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            # First the process groups that we started, whether or not they have entered their namespace by now.
            for process in self._started:
                _end(process)
            self._started.clear()
            if self._relay is not None:
                self._relay.close()
                self._relay = None
            if self._owned is not None:
                owned, self._owned = self._owned, None
                hosts.release(self.id, owned)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def command(self, host: int, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The command that runs `argv` in the host, for programs that start it themselves. Raises ValueError."""
        name = self.name(host)
        # The variable marks the process as the lab's until, and after, it has entered the namespace.
        variables = [f"{hosts.MARK}={self.id}"]
        if self._cpus:
            variables.append(f"{hosts.CPUS}={';'.join(f'{self.name(h)}={cpus}' for h, cpus in enumerate(self._cpus))}")
        enter = ["env", *variables, "ip", "netns", "exec", self.id + name]
        enter += ["taskset", "-c", self._cpus[host]] if self._cpus else []
        rename = ["unshare", "--uts", "sh", "-c", 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"', name]
        return [*enter, *rename, *(os.fspath(word) for word in argv)]

    def popen(self, host: int, argv: Sequence[str | os.PathLike[str]], **kwargs: Any) -> subprocess.Popen[Any]:
        """Start `argv` in the host, as subprocess.Popen does; in a session of its own, which ends with the lab."""
        process = subprocess.Popen(self.command(host, argv), start_new_session=True, **kwargs)
        self._started.append(process)
        return process

    def run(
        self,
        host: int,
        argv: Sequence[str | os.PathLike[str]],
        *,
        input: Any = None,
        capture_output: bool = False,
        timeout: float | None = None,
        check: bool = False,
        **kwargs: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Run `argv` in the host to its end, as subprocess.run does; what it started too is killed on an error."""
        if input is not None:
            kwargs["stdin"] = subprocess.PIPE
        if capture_output:
            kwargs["stdout"] = kwargs["stderr"] = subprocess.PIPE
        with self.popen(host, argv, **kwargs) as process:
            try:
                stdout, stderr = process.communicate(input, timeout)
            except BaseException:
                _end(process)
                raise
            finally:
                self._started.remove(process)
        done = subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)
        if check:
            done.check_returncode()
        return done

    def address(self, host: int) -> str:
        """IPv4 address of the host. Raises ValueError."""
        return f"10.77.0.{self._check(host) + 1}"

    def name(self, host: int) -> str:
        """Hostname of the host: h0, h1, ... Raises ValueError."""
        return f"h{self._check(host)}"

    def ssh_agent(self) -> Path:
        """A script for Open MPI's plm_ssh_agent; mpirun itself must run in a host of the lab."""
        return sources() / "ssh_agent.sh"

    def sent(self, host: int) -> int:
        """Bytes that the host has sent on its link so far, with Ethernet, IP and TCP headers (the kernel's counter).

        The headers of the packets of one large TCP frame (up to 64 KiB) count once. Raises ValueError.
        """
        show = hosts.ip("-n", self._namespace(host), "-s", "-j", "link", "show", "dev", "eth0")
        return int(json.loads(show)[0]["stats64"]["tx"]["bytes"])

    @contextmanager
    def traffic(self) -> Iterator[Traffic]:
        """`with lab.traffic() as t: ...` leaves in t.sent the bytes that each host sent within the block."""
        traffic = Traffic()
        before = [self.sent(host) for host in range(self.n_hosts)]
        yield traffic
        traffic.sent = [self.sent(host) - then for host, then in enumerate(before)]

    def cut(self, host: int) -> None:
        """Pull the host's cable: it has no carrier, and what anybody sends to it or from it vanishes. See `mend`."""
        self._tell(f"cable {self._check(host)} 0")

    def mend(self, host: int) -> None:
        """Put the host's cable back."""
        self._tell(f"cable {self._check(host)} 1")

    def set_conditions(self, conditions: Network) -> None:
        """Change the conditions, as in the constructor; with a mapping, those of the hosts and pairs it names.

        They hold on return; packets on their way keep the delay they had. Raises ValueError.
        """
        self._note(conditions)
        self._apply()

    @property
    def relay_pid(self) -> int:
        """Process id of the relay, e.g. to see how busy it is."""
        assert self._relay is not None, "the lab is closed"
        return self._relay.pid

    def _check(self, host: int) -> int:
        if not 0 <= host < self.n_hosts:
            raise ValueError(f"expected host 0 to {self.n_hosts - 1}, got {host!r}")
        return host

    def _namespace(self, host: int) -> str:
        return self.id + self.name(host)

    def _tell(self, line: str) -> None:
        assert self._relay is not None, "the lab is closed"
        self._relay.tell(line)

    def _note(self, conditions: Network) -> None:
        if not isinstance(conditions, Mapping):
            self._conditions.clear()
            conditions = dict.fromkeys(range(self.n_hosts), conditions)
        for where in conditions:
            for host in (where,) if isinstance(where, int) else where:
                self._check(host)
        self._conditions.update(conditions)

    def _start(self) -> None:
        self.id, self._owned = hosts.claim()
        everyone = range(self.n_hosts)
        for host in everyone:
            hosts.make_namespace(self._namespace(host), [(self.address(h), self.name(h)) for h in everyone])
        self._relay = Relay([self._namespace(host) for host in everyone])
        for host in everyone:
            # The relay reads the host's number in the address. Known neighbours and no IPv6: nobody sends a byte
            # that no program sent, and neither loss nor delay hits ARP.
            lines = [
                "link set lo up",
                f"link set eth0 address {_mac(host)} addrgenmode none txqueuelen 10000",
                f"address add {self.address(host)}/24 dev eth0",
                "link set eth0 up",
                *(
                    f"neighbour add {self.address(h)} lladdr {_mac(h)} dev eth0 nud permanent"
                    for h in everyone
                    if h != host
                ),
            ]
            hosts.ip("-n", self._namespace(host), "-batch", "-", stdin="\n".join(lines))
        self._apply()

    def _apply(self) -> None:
        for host in range(self.n_hosts):
            link = self._conditions.get(host, Conditions())
            self._shape(host, link)
            for other in range(self.n_hosts):
                pair = self._conditions.get((host, other))
                path = pair or link
                rate = (pair.rate_bit if pair else None) or 0
                times = f"{path.delay_s * 1e9:.0f} {path.jitter_s * 1e9:.0f}"
                self._tell(f"path {host} {other} {rate} {path.queue_bytes} {times} {path.loss}")

    def _shape(self, host: int, link: Conditions) -> None:
        # The relay keeps the time; a bucket before it makes senders wait, as the queue of a real NIC does. It passes
        # at once what fits the bucket: two large frames, or a millisecond, less than which the kernel cannot time.
        rate = link.rate_bit or 0
        burst = max(128 * 1024, int(rate / 8 * 1e-3))
        qdisc = ["-n", self._namespace(host), "qdisc"]
        if rate:
            bucket = ["rate", f"{int(rate * _OFFERED)}bit", "burst", str(burst), "overhead", "24"]
            limit = ["limit", str(link.queue_bytes)]
            hosts.ip(*qdisc, "replace", "dev", "eth0", "root", "tbf", *bucket, *limit, program="tc")
        else:
            hosts.ip(*qdisc, "replace", "dev", "eth0", "root", "pfifo_fast", program="tc")
        self._tell(f"host {host} {rate} {2 * burst} {max(link.queue_bytes, 2 * burst)}")


def _mac(host: int) -> str:
    return f"02:6f:61:00:00:{host:02x}"


def _end(process: subprocess.Popen[Any]) -> None:
    # Until it is waited for, the leader keeps the number of its group from being used again.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
