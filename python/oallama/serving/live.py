"""What a running server does now: slots, queue, tokens per second and guests of each model, by its /metrics."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oallama.errors import OallamaError

_SERIES = re.compile(r"^llamacpp:(\w+(?:\{[^}]*\})?) ([-+.\deE]+)$", re.MULTILINE)
_TIMEOUT_S = 5.0
_HINTS = {
    401: "; set OPENAI_API_KEY",
    501: "; the server must run with --metrics, and without --no-slots",
}
UNDER_WAY = "tokens of answers under way"  # beside the counters


@dataclass(frozen=True)
class ModelNow:
    """A model of a server at one moment.

    Attributes:
        state: llama-server's word: loaded, loading, unloaded, ..
        n_busy: slots with a request. n_slots: all of them, guests' included.
        n_waiting: requests in its queue.
        prompt_per_s, tokens_per_s: prompt tokens and generated ones since the look before; None in the first one.
        n_guests: sequences that are with other models; None: it has no guests. n_lost: guests that came home so far.
        waited: seconds that it waited for guests' attention in each second since the look before.
        n_kept: guests of another model that are here; None: it lends no memory. used_bytes, lent_bytes: of that memory.
    """

    name: str
    state: str
    n_busy: int | None = None
    n_slots: int | None = None
    n_waiting: int | None = None
    prompt_per_s: float | None = None
    tokens_per_s: float | None = None
    n_guests: int | None = None
    n_lost: int | None = None
    waited: float | None = None
    n_kept: int | None = None
    used_bytes: int | None = None
    lent_bytes: int | None = None


class _NoAnswer(OallamaError):
    """Nobody, or nobody who could answer now."""


@dataclass
class Watch:
    """Looks at a server of one model or at a router, again and again.

    It loads nothing and wakes no model of a router. A server of one model that sleeps (--sleep-idle-seconds) is woken.
    """

    url: str
    _before: dict[str, tuple[float, Mapping[str, float]]] = field(default_factory=dict)

    def look(self) -> list[ModelNow]:
        """Every model, in the server's order.

        Raises:
            OallamaError: nobody answers there, it is no llama-server, or it does not tell.
        """
        try:
            listed = json.loads(self._get("/v1/models"))["data"]
            return [self._model(each["id"], each["status"]["value"] if "status" in each else None) for each in listed]
        except OallamaError:
            raise
        except (ValueError, TypeError, KeyError, IndexError):
            raise OallamaError(f"what answers at {self.url} is no llama-server") from None

    def _model(self, name: str, state: str | None) -> ModelNow:
        """state: None where the server has one model."""
        if state not in (None, "loaded"):
            self._before.pop(name, None)
            return ModelNow(name, str(state))
        of_model = f"?{urllib.parse.urlencode({'model': name, 'autoload': 'false'})}" if state else ""
        try:
            values = series(self._get(f"/metrics{of_model}"))
            now = time.monotonic()
            slots = json.loads(self._get(f"/slots{of_model}"))
        except _NoAnswer:
            if state is None:
                raise
            return ModelNow(name, "no answer")  # it may have died since it was listed
        # llama-server counts the tokens of an answer when it has ended.
        values[UNDER_WAY] = sum(slot["next_token"][0]["n_decoded"] for slot in slots if slot["is_processing"])
        then, before = self._before.get(name, (now, {}))
        self._before[name] = now, values
        return model_now(name, state or "loaded", len(slots), values, before, now - then)

    def _get(self, path: str) -> str:
        key = os.environ.get("OPENAI_API_KEY")
        try:
            request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {key}"} if key else {})
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return str(answer.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            kind = _NoAnswer if error.code in (400, 500, 502, 503) else OallamaError
            raise kind(f"{self.url}{path} answers {error.code}{_HINTS.get(error.code, '')}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            what = getattr(error, "reason", error)
            raise _NoAnswer(f"no server answers at {self.url} ({what}); `oallama serve` starts one") from None


def series(text: str) -> dict[str, float]:
    """Prometheus's text format: name, with labels where it has some, and value."""
    return {name: float(value) for name, value in _SERIES.findall(text)}


def model_now(
    name: str, state: str, n_slots: int, values: Mapping[str, float], before: Mapping[str, float], seconds: float
) -> ModelNow:
    """From the metrics of two looks, and the tokens of answers under way; before: empty in the first look."""

    def count(series: str) -> int | None:
        return int(values[series]) if series in values else None

    def rate(series: str, more: str = "") -> float | None:
        new, old = values.get(series), before.get(series)
        if new is None or old is None or new < old or seconds <= 0:
            return None  # a counter that has become less is of another process
        grown = new - old + values.get(more, 0.0) - before.get(more, 0.0)
        return max(0.0, grown) / seconds  # an answer may end between the two requests of a look

    lost = [value for series, value in values.items() if series.startswith("weave_lost_guests_total")]
    return ModelNow(
        name,
        state,
        n_busy=count("requests_processing"),
        n_slots=n_slots,
        n_waiting=count("requests_deferred"),
        prompt_per_s=rate("prompt_tokens_total"),
        tokens_per_s=rate("tokens_predicted_total", UNDER_WAY),
        n_guests=count("weave_guests"),
        n_lost=int(sum(lost)) if lost else None,
        waited=rate("weave_waited_seconds_total"),
        n_kept=count("weave_kept_guests"),
        used_bytes=count("weave_used_bytes"),
        lent_bytes=count("weave_lent_bytes"),
    )


def as_json(models: list[ModelNow]) -> list[dict[str, Any]]:
    """Without what a model does not have."""
    return [{key: value for key, value in vars(model).items() if value is not None} for model in models]
