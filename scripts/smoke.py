#!/usr/bin/env python3
"""Installs oallama from an index into a new environment and uses it as a new user would; times each step.

For a machine without compiler (scripts/release.sh try): standard library only. Fails at the first step that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

BUILD_TOOLS = ("cc", "gcc", "c++", "g++", "clang", "cmake", "ninja", "make", "git", "glslc", "nvcc")
FIRST_TOKEN = """
from oallama import Llama, demo_model
llm = Llama(str(demo_model()), n_ctx=256, verbose=False)
print(llm.create_completion("One sunny day, Anna", max_tokens=1)["choices"][0]["text"])
"""
SERVE_S = 180.0


def run(*command: str | Path) -> str:
    """Standard output of a command that ends well."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"smoke: error: {' '.join(map(str, command[:4]))} ended with {done.returncode}:\n"
                 f"{(done.stdout + done.stderr)[-3000:]}")  # fmt: skip
    return done.stdout


def get(url: str, body: dict[str, object] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def serve(program: Path, model: str) -> str:
    """Starts a server, looks at its page, chats, ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([program, "serve", model, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + SERVE_S
        while True:
            try:
                get(f"{base}/health")
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > end:
                    sys.exit(f"smoke: error: oallama serve does not answer (status {server.poll()})")
                time.sleep(0.2)
        assert "<title>" in get(f"{base}/"), "the page at / has no title"
        asked = {"prompt": "One sunny day, Anna", "max_tokens": 8}
        return json.loads(get(f"{base}/v1/completions", asked))["choices"][0]["text"]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description="Installs oallama and uses it.")
    parser.add_argument("--index", required=True, help="URL of a package index that has oallama")
    parser.add_argument("--folder", type=Path, default=Path("/opt/venv"), help="of the new environment")
    arguments = parser.parse_args()
    tools = [tool for tool in BUILD_TOOLS if shutil.which(tool)]
    print(f"machine: {Path('/etc/os-release').read_text().splitlines()[0]}, Python {sys.version.split()[0]}, "
          f"build tools: {', '.join(tools) or 'none'}")  # fmt: skip
    times: dict[str, float] = {}

    def timed(step: str, do: Callable[[], str]) -> str:
        start = time.monotonic()
        said = do()
        times[step] = round(time.monotonic() - start, 1)
        last = said.strip().splitlines()[-1:] or [""]
        print(f"{step:12} {times[step]:6.1f} s   {last[0][:90]}", flush=True)
        return said

    venv, bin_ = arguments.folder, arguments.folder / "bin"
    shutil.rmtree(venv, ignore_errors=True)
    timed("environment", lambda: run(sys.executable, "-m", "venv", venv))
    pip = (bin_ / "pip", "install", "--quiet", "--no-cache-dir", "--only-binary", ":all:")
    # The newest of both indexes would be taken: so our wheel is fetched first, and installed as a file.
    with tempfile.TemporaryDirectory() as folder:
        fetch = (bin_ / "pip", "download", "--quiet", "--no-deps", "--dest", folder, "--index-url", arguments.index)
        run(*fetch, "oallama")
        (wheel,) = Path(folder).iterdir()
        timed("install", lambda: run(*pip, wheel))
    timed("first token", lambda: run(bin_ / "python", "-c", FIRST_TOKEN))
    timed("again", lambda: run(bin_ / "python", "-c", FIRST_TOKEN))
    timed("version", lambda: run(bin_ / "oallama", "--version"))
    doctor = json.loads(timed("doctor", lambda: run(bin_ / "oallama", "doctor", "--json")))
    model = run(bin_ / "python", "-c", "from oallama import demo_model; print(demo_model())").strip()
    timed("plan", lambda: run(bin_ / "oallama", "plan", model, "--local-rpc", "--vram", "50%"))
    timed("serve", lambda: serve(bin_ / "oallama", model))
    os.sync()
    size = sum(file.stat().st_size for file in (venv / "lib").rglob("*") if file.is_file())
    print(json.dumps({"seconds": times, "build_tools": tools, "installed_bytes": size, "doctor": doctor}))


if __name__ == "__main__":
    main()
