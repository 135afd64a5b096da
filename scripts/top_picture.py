#!/usr/bin/env python3
"""The picture of `oallama top` in README.md: two small models with random weights, the hot one with guests.

.venv/bin/python scripts/top_picture.py   # writes docs/pictures/top.svg; needs the engine, half a minute

A server is started, asked eight things at once, and looked at. Its numbers are those of the machine that drew it.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

from rich.console import Console

from oallama.base.children import die_with_parent
from oallama.base.ports import free_port
from oallama.errors import OallamaError
from oallama.modelmaker import make_model
from oallama.serving.live import ModelNow, Watch
from oallama.views.top import render_top

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "top.svg"
URL = "http://127.0.0.1:8080"  # in the picture
EVERY_S = 2.0
N_REQUESTS = {"hot": 7, "cold": 1}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = {name: make_model(Path(folder) / f"{name}.gguf", shape="small", file_type="Q8_0") for name in N_REQUESTS}
        port = free_port()
        command = [Path(sys.executable).parent / "oallama", "serve", "--hot", made["hot"], "--cold", made["cold"]]
        command += ["--parallel", "4", "--ctx", "4096", "--threads", "1", "--deadline", "5", "--port", str(port)]
        command.append("--no-plan")
        process = subprocess.Popen([*map(str, command)], preexec_fn=die_with_parent, stderr=subprocess.DEVNULL)
        try:
            models = busy(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait()
    console = Console(width=90, record=True, file=io.StringIO(), force_terminal=True)
    console.print("[bold]$ oallama top[/bold]\n", highlight=False)
    console.print(render_top(models, URL))
    PICTURE.write_text(console.export_svg(title="two models, one with guests", unique_id="top"))
    print(f"wrote {PICTURE}")


def busy(url: str) -> list[ModelNow]:
    """The models while they answer, of two looks."""
    ended, watch = Event(), Watch(url)

    def ask(name: str) -> None:
        body = json.dumps({"model": name, "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        while not ended.is_set():
            with suppress(OSError):
                urllib.request.urlopen(request, timeout=60).read()

    with ThreadPoolExecutor(sum(N_REQUESTS.values())) as pool:
        try:
            for name, n in N_REQUESTS.items():
                for _ in range(n):
                    pool.submit(ask, name)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                time.sleep(EVERY_S)
                with suppress(OallamaError):
                    models = watch.look()
                    if any(model.n_guests for model in models) and all(model.tokens_per_s for model in models):
                        return models
        finally:
            ended.set()
    raise SystemExit("the models had no guests within a minute")


if __name__ == "__main__":
    main()
