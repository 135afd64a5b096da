"""Network namespaces of a lab, and its end: whatever a lab left behind is found by the name of the lab alone.

A lab is the name `oalab<pid>`, a lock file of that name that its owner keeps locked (so that the kernel, not a pid that
may be somebody else's by now, says whether the owner lives), and namespaces `<lab>h0`, `<lab>h1`, ... Its processes are
those in its namespaces and those that carry OALLAMA_NETLAB=<lab> in their environment.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from oallama.base import environment

MARK, CPUS = environment.NETLAB.name, environment.NETLAB_CPUS.name
STATE = Path("/run/oallama-netlab")
NAMESPACES = Path("/run/netns")
ETC = Path("/etc/netns")  # <namespace>/hosts is /etc/hosts for what `ip netns exec` starts

_ROOT = "needs root, for network namespaces and TAP devices: run it with sudo"
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "c++": "g++"}
_KILL_S = 120.0  # for processes to die; only a hung kernel or disk takes more than a moment


class NetLabError(RuntimeError):
    """This machine cannot do what the lab needs; the text says why, and what to install where that helps."""


def missing() -> str | None:
    """Why no lab can be made here, in one line; None if it can."""
    if os.geteuid() != 0:
        return _ROOT
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None:
            return f"needs the program {program!r}: apt-get install {package}"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun: modprobe tun, or docker run --device /dev/net/tun"
    if subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True).returncode != 0:
        return "may not make network namespaces here: docker run --cap-add NET_ADMIN --cap-add SYS_ADMIN"
    return None


def ip(*args: str, program: str = "ip", stdin: str | None = None) -> str:
    """Output of `ip args` (or `tc args`). Raises NetLabError with the program's own text."""
    # In a session of its own: Ctrl-C is for the owner of the lab, which cleans up with this very program.
    done = subprocess.run([program, *args], input=stdin, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise NetLabError(f"{program} {' '.join(args)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def claim() -> tuple[str, int]:
    """A name that no living lab has, and the locked file that makes it ours; end with `release`."""
    STATE.mkdir(mode=0o755, parents=True, exist_ok=True)
    number = 0
    while True:
        lab = f"oalab{os.getpid()}" + (f"x{number}" if number else "")
        lock = _lock(lab)
        if lock is not None:
            destroy(lab)  # of an owner long dead that had our pid
            return lab, lock
        number += 1


def release(lab: str, lock: int) -> None:
    """Destroy the lab; if that fails, `clean` can try again."""
    try:
        destroy(lab)
        _lock_path(lab).unlink(missing_ok=True)
    finally:
        os.close(lock)


def clean() -> list[str]:
    """Destroy the labs whose owner has died; returns their names. Raises NetLabError."""
    if os.geteuid() != 0:
        raise NetLabError(_ROOT)
    labs = []
    for path in sorted(STATE.glob("oalab*.lock")):
        lock = _lock(path.stem)
        if lock is not None:
            release(path.stem, lock)
            labs.append(path.stem)
    return labs


def make_namespace(name: str, hosts: Sequence[tuple[str, str]]) -> None:
    """An empty namespace in which the (address, name) pairs of `hosts` resolve."""
    lines = ["127.0.0.1 localhost", *(f"{address} {host}" for address, host in hosts)]
    (ETC / name).mkdir(parents=True, exist_ok=True)
    (ETC / name / "hosts").write_text("\n".join(lines) + "\n")
    ip("netns", "add", name)


def destroy(lab: str) -> None:
    """Kill every process of the lab, then remove its namespaces. Raises NetLabError if a process does not die."""
    _kill_processes(lab)
    for path in _of_lab(NAMESPACES, lab):
        ip("netns", "del", path.name)
    for path in _of_lab(ETC, lab):
        shutil.rmtree(path)
    with suppress(OSError):  # absent, or not only ours
        ETC.rmdir()


def _lock_path(lab: str) -> Path:
    return STATE / f"{lab}.lock"


def _lock(lab: str) -> int | None:
    """The lab's lock file, locked; None if its owner lives."""
    while True:
        lock = os.open(_lock_path(lab), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if os.fstat(lock).st_nlink > 0:
            return lock
        os.close(lock)  # somebody cleaned it away between our two steps


def _of_lab(folder: Path, lab: str) -> list[Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if re.fullmatch(rf"{lab}h\d+", path.name))


def _kill_processes(lab: str) -> None:
    deadline = time.monotonic() + _KILL_S
    # Twice none: one that forks and exits behind the back of the first look is in the second.
    for quiet in (False, False):
        while not quiet:
            pids = list(_processes(lab))
            quiet = not pids
            for pid in pids:
                _kill(pid, lab)
            if pids and time.monotonic() > deadline:
                raise NetLabError(f"processes {pids} of {lab} do not die")
            time.sleep(0.01 if pids else 0)


def _processes(lab: str) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and _belongs(int(entry), lab):
            yield int(entry)


def _belongs(pid: int, lab: str) -> bool:
    try:  # a zombie has no namespace and no environment left
        net = os.stat(f"/proc/{pid}/ns/net")
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    if f"{MARK}={lab}".encode() in environment:
        return True
    return any(os.path.samestat(net, os.stat(path)) for path in _of_lab(NAMESPACES, lab))


def _kill(pid: int, lab: str) -> None:
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if _belongs(pid, lab):  # still: from here on the handle, unlike a pid, cannot become another process
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
