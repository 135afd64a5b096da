"""The keys of a joined host, and the folder where hosts and clients keep theirs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from oallama.base.jsonfile import read_json_object
from oallama.errors import OallamaError

from .token import KEY_BYTES, Token, public_bytes


def config_folder() -> Path:
    """`$XDG_CONFIG_HOME/oallama`, by default `~/.config/oallama`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "oallama"


@dataclass(frozen=True)
class OwnKeys:
    """What a joined host is known by, the seed of its private key, and its token."""

    host_key: bytes
    token: Token


def own_keys(new_token: bool = False) -> OwnKeys:
    """This host's; made at the first call. new_token: the one before is of no use from now on.

    Raises:
        OallamaError: when they cannot be read or written.
    """
    file = config_folder() / "join.json"
    content = read_json_object(file, "keys of this host", f"remove {file}") if file.exists() else {}
    try:
        host_seed = bytes.fromhex(content["host_key"]) if content else os.urandom(KEY_BYTES)
        public = public_bytes(host_seed)
        kept = content and not new_token
        token = Token(bytes.fromhex(content["client_key"]), public) if kept else Token.new(public)
    except (KeyError, TypeError, ValueError):
        raise OallamaError(f"{file} is damaged; remove it, and add this host again where it was known") from None
    if not kept:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(file, json.dumps({"host_key": host_seed.hex(), "client_key": token.client_key.hex()}) + "\n")
        except OSError as error:
            raise OallamaError(f"cannot write {file}: {error.strerror}") from None
    return OwnKeys(host_seed, token)


def write_private(path: Path, text: str) -> None:
    """A file that its owner alone can read, whole or not at all. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(aside, path)
