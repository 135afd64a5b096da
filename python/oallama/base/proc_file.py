"""Files of /proc that have a line "name: value" for each thing they tell."""

from __future__ import annotations

from pathlib import Path


def fields(path: Path) -> dict[str, str]:
    """The values by name, up to the first empty line: that ends the first processor's part of /proc/cpuinfo.

    Nothing where the file cannot be read.
    """
    found: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                found[name.strip()] = value.strip()
    except OSError:
        pass
    return found
