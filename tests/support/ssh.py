"""An sshd of our own, without a password and without the files of whoever runs the tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SSHD = Path("/usr/sbin/sshd")
needs_sshd = pytest.mark.skipif(not SSHD.exists(), reason="needs sshd: apt-get install openssh-server")


def sshd_on(folder: Path, address: str, port: int) -> tuple[list[str], list[str]]:
    """The command of an sshd, for root, and the options that ssh needs for it; keys and settings lie in `folder`."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # it insists
    options = ["-p", str(port), "-i", str(folder / "user"), "-o", "UserKnownHostsFile=/dev/null"]
    options += ["-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR", "-F", "none"]
    return [str(SSHD), "-D", "-e", "-f", str(config)], options
