"""`oallama top`: a running server, live."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from oallama.base.printing import print_json
from oallama.errors import OallamaError
from oallama.serving.live import Watch, as_json
from oallama.views.top import render_top

from .options import Json
from .terminal import out


def top(
    url: Annotated[str, typer.Argument(help="Where the server listens.")] = "http://127.0.0.1:8080",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="End after two looks, as where there is no terminal.")] = False,
    json: Json = False,
) -> None:
    """Show what a running server does: slots, queue, tokens per second and guests of each model, until Ctrl-C.

    $OPENAI_API_KEY is sent where it is set.
    """
    watch = Watch(url.rstrip("/"))
    models = watch.look()
    if once or json or not out.is_terminal:
        time.sleep(every)
        models = watch.look()
        if json:
            print_json(as_json(models))
        else:
            out.print(render_top(models, watch.url))
        return
    try:
        with Live(render_top(models, watch.url), console=out, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(_view(watch), refresh=True)
    except KeyboardInterrupt:
        return


def _view(watch: Watch) -> RenderableType:
    """A server that is started again is waited for."""
    try:
        return render_top(watch.look(), watch.url)
    except OallamaError as error:
        return Group(render_top([], watch.url), Text(str(error), style="yellow"))
