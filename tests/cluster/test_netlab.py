"""The network testbed (oallama.netlab): what it promises about bytes, times and losses, and that it leaves nothing.

Times have lower bounds only: CI machines are slow, but a packet that is early is a bug anywhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oallama.netlab import Conditions, NetLab, NetLabError, Probe, relay
from oallama.netlab import hosts as netlab_hosts
from oallama.netlab.__main__ import main
from oallama.netlab.conditions import parse_rate, parse_share, parse_time
from support.lab import needs_lab
from support.paths import ROOT
from support.processes import until

PATIENCE_S = 300.0  # for what happens at once unless the machine is very busy


@pytest.fixture(scope="module")
def shared() -> Iterator[NetLab]:
    with NetLab(3) as lab:
        yield lab


@pytest.fixture
def lab(shared: NetLab) -> NetLab:
    """Three hosts without limits."""
    shared.set_conditions(Conditions())
    return shared


@pytest.fixture
def probe(lab: NetLab) -> Probe:
    """A server in host 1."""
    return Probe(lab, 1)


def remains(lab: str) -> list[object]:
    """Whatever is left of the lab."""
    files = [
        *Path("/run/netns").glob(f"{lab}*"),
        *Path("/etc/netns").glob(f"{lab}*"),
        *netlab_hosts.STATE.glob(f"{lab}*"),
    ]
    return [*files, *netlab_hosts._processes(lab)]


def output(lab: NetLab, host: int, *argv: str) -> str:
    return lab.run(host, argv, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@needs_lab
def test_hosts_have_names_and_reach_one_another(lab: NetLab) -> None:
    assert [output(lab, host, "uname", "-n") for host in range(3)] == ["h0", "h1", "h2"]
    assert os.uname().nodename not in ("h0", "h1", "h2")
    assert output(lab, 2, "getent", "hosts", "h1").split() == [lab.address(1), "h1"]
    for to in range(3):
        probe = Probe(lab, to)
        for host in range(3):  # itself too: loopback is up
            assert len(probe.round_trips(host, 2)) == 2


@needs_lab
def test_ssh_agent_runs_a_command_line_in_another_host(lab: NetLab) -> None:
    agent = str(lab.ssh_agent())
    assert output(lab, 0, agent, "h2", "uname -n;", "echo", "'a  b'") == "h2\na  b"
    unknown = lab.run(0, [agent, "h3", "true"], capture_output=True, text=True)
    assert unknown.returncode == 255 and "'h3'" in unknown.stderr


@needs_lab
def test_sent_counts_the_bytes_of_programs_and_no_others(lab: NetLab) -> None:
    with NetLab(2) as quiet:
        assert [quiet.sent(0), quiet.sent(1)] == [0, 0]
    probe = Probe(lab, 1)
    n_bytes = 8_000_000
    with lab.traffic() as traffic:
        probe.transfer(0, n_bytes)
    assert n_bytes < traffic.sent[0] < 1.25 * n_bytes
    assert 0 < traffic.sent[1] < 0.25 * n_bytes  # acknowledgements
    assert traffic.sent[2] == 0


@needs_lab
def test_delay_is_in_every_round_trip(lab: NetLab, probe: Probe) -> None:
    for delay_s in (0.02, 0.005):  # changed at run time
        lab.set_conditions(Conditions(delay_s=delay_s))
        assert min(probe.round_trips(0, 10)) >= 2 * delay_s
    lab.set_conditions(Conditions(delay_s=0.01, jitter_s=0.004))
    assert min(probe.round_trips(0, 30)) >= 2 * 0.006


@needs_lab
def test_a_pair_has_conditions_of_its_own(lab: NetLab, probe: Probe) -> None:
    lab.set_conditions({0: Conditions(delay_s=0.001), (0, 1): Conditions(delay_s=0.03), 1: Conditions(delay_s=0.01)})
    assert min(probe.round_trips(0, 3)) >= 0.04
    assert min(probe.round_trips(2, 3)) >= 0.01


@needs_lab
@pytest.mark.parametrize("slow", [0, 1, (0, 1)], ids=["sender", "receiver", "path"])
def test_nothing_is_faster_than_the_rate(lab: NetLab, probe: Probe, slow: int | tuple[int, int]) -> None:
    rate_bit, n_bytes = 50e6, 2_000_000
    lab.set_conditions({slow: Conditions(rate_bit=rate_bit)})
    assert probe.transfer(0, n_bytes) >= n_bytes * 8 / rate_bit


@needs_lab
def test_two_senders_share_the_receivers_rate(lab: NetLab) -> None:
    rate_bit, n_bytes = 50e6, 1_000_000
    lab.set_conditions({1: Conditions(rate_bit=rate_bit)})
    probes = [Probe(lab, 1), Probe(lab, 1)]
    started = time.perf_counter()
    clients = [
        lab.popen(host, p.command("transfer", n_bytes), stdout=subprocess.PIPE)
        for host, p in zip((0, 2), probes, strict=True)
    ]
    assert [client.communicate(timeout=PATIENCE_S) and client.returncode for client in clients] == [0, 0]
    assert time.perf_counter() - started >= 2 * n_bytes * 8 / rate_bit


@needs_lab
def test_loss_takes_its_share(lab: NetLab, probe: Probe) -> None:
    assert probe.datagrams(0, 2000) == 2000
    lab.set_conditions({0: Conditions(loss=0.2)})
    assert 1450 < probe.datagrams(0, 2000) < 1750  # 1600, standard deviation 18
    lab.set_conditions({(0, 1): Conditions(loss=0.0)})
    assert probe.datagrams(0, 2000) == 2000


@needs_lab
def test_losses_cut_large_frames_without_damage(lab: NetLab, tmp_path: Path) -> None:
    """The relay takes lost packets out of frames of 64 KiB; what TCP makes of the rest must be what was sent."""
    sent, received = tmp_path / "sent", tmp_path / "received"
    sent.write_bytes(os.urandom(5_000_000))
    lab.set_conditions({0: Conditions(loss=0.01)})
    server = "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); "
    server += "f = s.accept()[0].makefile('rb'); open(sys.argv[1], 'wb').write(f.read())"
    client = (
        "import socket, sys; s = socket.create_connection(sys.argv[1:3]); s.sendall(open(sys.argv[3], 'rb').read())"
    )
    receiver = lab.popen(1, [sys.executable, "-c", server, received], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    port = receiver.stdout.readline().strip()
    lab.run(0, [sys.executable, "-c", client, lab.address(1), port, sent], check=True)
    assert receiver.wait(PATIENCE_S) == 0
    assert received.read_bytes() == sent.read_bytes()


@needs_lab
def test_a_pulled_cable_lets_nothing_through(lab: NetLab, probe: Probe) -> None:
    carrier = ("cat", "/sys/class/net/eth0/carrier")
    knock = f"import socket; socket.create_connection(('{lab.address(1)}', {probe.port}), timeout=1)"
    assert output(lab, 1, *carrier) == "1"
    lab.cut(1)
    assert output(lab, 1, *carrier) == "0"
    assert output(lab, 0, *carrier) == "1"
    refused = lab.run(0, [sys.executable, "-c", knock], capture_output=True, text=True)
    assert refused.returncode == 1 and "timed out" in refused.stderr
    lab.mend(1)
    assert len(probe.round_trips(0, 3)) == 3


@needs_lab
def test_run_is_like_subprocess_run(lab: NetLab) -> None:
    assert lab.run(0, ["cat"], input="x", text=True, capture_output=True).stdout == "x"
    assert lab.run(0, ["sh", "-c", "exit 3"]).returncode == 3
    with pytest.raises(subprocess.CalledProcessError):
        lab.run(0, ["false"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run(0, ["sleep", "1000"], timeout=0.1)


@needs_lab
def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), NetLab(2) as lab:
        lab.popen(1, ["setsid", "sh", "-c", "sleep 1000 & sleep 1000"])
        # Most of these have not entered their namespace when the block ends.
        last = [lab.popen(0, ["sleep", "1000"]) for _ in range(20)]
        assert remains(lab.id)
        1 / 0  # noqa: B018
    assert remains(lab.id) == []
    assert [process.returncode for process in last] == [-signal.SIGKILL] * len(last)


@needs_lab
def test_nothing_is_left_after_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oallama.netlab.lab._mac", lambda host: "nonsense")
    lab = NetLab(1)
    with pytest.raises(NetLabError, match="nonsense"):
        lab.__enter__()
    assert lab.id and remains(lab.id) == []


@needs_lab
def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "oallama.netlab", "run", "--", "sh", "-c", f"touch {ready}; sleep 1000"]
    owner = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(ready.exists, PATIENCE_S)
    owner.send_signal(signal.SIGINT)
    _, errors = owner.communicate(timeout=PATIENCE_S)
    assert (owner.returncode, errors) == (130, "netlab: interrupted; everything is cleaned up\n")
    assert remains(f"oalab{owner.pid}") == []


@needs_lab
def test_clean_removes_the_labs_of_killed_owners_only(lab: NetLab) -> None:
    program = """
import sys, time
from oallama.netlab import NetLab
with NetLab(2) as lab:
    lab.popen(1, ["sleep", "1000"])
    print(lab.id, lab.relay_pid, flush=True)
    time.sleep(1000)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name, relay = owner.stdout.readline().split()
    owner.kill()
    owner.wait()
    until(lambda: not Path(f"/proc/{relay}/environ").exists(), PATIENCE_S)
    assert remains(name)
    cleaned = subprocess.run([sys.executable, "-m", "oallama.netlab", "clean"], stdout=subprocess.PIPE, text=True)
    assert cleaned.returncode == 0 and name in cleaned.stdout and lab.id not in cleaned.stdout.split()
    assert remains(name) == []
    assert output(lab, 0, "uname", "-n") == "h0"


@needs_lab
def test_run_fills_in_addresses_and_reports_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--rate", "1gbit", "--on", "1", "--", "echo", "{0}", "{1}"]) == 0
    out, err = capfd.readouterr()
    assert out == "10.77.0.1 10.77.0.2\n"
    assert err == "netlab: h0 sent 0 bytes\nnetlab: h1 sent 0 bytes\n"
    assert main(["run", "--", "sh", "-c", "exit 7"]) == 7


@needs_lab
def test_check_prints_what_was_asked_and_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--rate", "20mbit", "--delay", "1ms"]) == 0
    fields = capsys.readouterr().out.splitlines()[1].split()
    assert [fields[0], fields[1], fields[4]] == ["h0-h1", "2.000", "20"]
    assert float(fields[2]) >= 2 and float(fields[5]) <= 20


def test_texts() -> None:
    assert [parse_rate(text) for text in ("1gbit", "2.5Gbit", "100 mbit", "unlimited")] == [1e9, 2.5e9, 1e8, None]
    assert [parse_time(text) for text in ("0", "0.25ms", "50us", "1s")] == pytest.approx([0, 0.25e-3, 50e-6, 1])
    assert [parse_share(text) for text in ("0", "1%", "0.01")] == pytest.approx([0, 0.01, 0.01])


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--rate", "1 gigabit"),
        ("--rate", "1"),
        ("--rate", "0gbit"),
        ("--delay", "5"),
        ("--delay", "-1ms"),
        ("--jitter", "1ms"),
        ("--loss", "150%"),
        ("--loss", "x"),
        ("--hosts", "0"),
        ("--hosts", "251"),
    ],
)
def test_bad_values_are_one_line(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{option}={text}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("netlab: ") and "expected" in error and error.count("\n") == 1


def test_bad_hosts_are_value_errors() -> None:
    lab = NetLab(2)
    for bad in (lambda: lab.address(2), lambda: lab.run(-1, ["true"]), lambda: NetLab(2, {(0, 2): Conditions()})):
        with pytest.raises(ValueError, match="expected host 0 to 1"):
            bad()


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for action in ("check", "clean"):
        assert main([action]) == 2
        assert capsys.readouterr().err == f"netlab: {netlab_hosts._ROOT}\n"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["check"]) == 2
    assert capsys.readouterr().err == "netlab: needs the program 'ip': apt-get install iproute2\n"


def test_an_installed_package_asks_for_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_PACKAGE", tmp_path)
    monkeypatch.chdir(ROOT)
    assert relay.sources() == ROOT / "csrc/netlab"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NetLabError, match="need a checkout of oallama as the current folder"):
        relay.sources()


def test_hosts_may_have_cpus_of_their_own() -> None:
    """Also programs that one host starts on another."""
    ours = sorted(os.sched_getaffinity(0))
    cpus = [str(ours[0]), str(ours[-1])]
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    with NetLab(2, cpus=cpus) as lab:
        assert [output(lab, host, sys.executable, "-c", show) for host in (0, 1)] == [f"[{cpu}]" for cpu in cpus]
        agent = str(lab.ssh_agent())
        assert output(lab, 0, agent, "h1", f"{sys.executable} -c '{show}'") == f"[{cpus[1]}]"
    with pytest.raises(ValueError, match="expected one entry for each of 3 hosts, got 2"):
        NetLab(3, cpus=cpus)
