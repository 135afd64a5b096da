"""The token of a joined host: what its client shows, and by what the client knows the host. Ed25519 keys of SSH."""

from __future__ import annotations

import base64
import os
import zlib
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from oallama.errors import OallamaError

KEY_BYTES = 32
_PREFIX = "oa1_"  # says what it is; without it, one token in 64 began with "-", as an option does
_LETTERS = 95  # of a token
_ED25519 = "cryptography.hazmat.primitives.asymmetric.ed25519"
_SERIALIZATION = "cryptography.hazmat.primitives.serialization"
INSTALL = "hosts that join need asyncssh: pip install 'oallama[cluster]'"


def library(name: str) -> Any:
    """asyncssh, or a part of cryptography, which comes with it. Raises OallamaError where they are not installed."""
    try:
        return import_module(name)
    except ImportError:
        raise OallamaError(INSTALL) from None


@dataclass(frozen=True)
class Token:
    """client_key: seed of the client's private key. host_key: the host's public key. 32 bytes each."""

    client_key: bytes
    host_key: bytes

    @classmethod
    def new(cls, host_key: bytes) -> Token:
        """A token for a host, with a client's key that nobody has had before."""
        return cls(os.urandom(KEY_BYTES), host_key)

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises OallamaError for a text that is no token, or is cut off or mistyped."""
        text = text.strip()
        coded = text.removeprefix(_PREFIX)
        try:
            content = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        except ValueError:
            content = b""
        keys, check = content[: 2 * KEY_BYTES], content[2 * KEY_BYTES :]
        if not text.startswith(_PREFIX) or len(keys) != 2 * KEY_BYTES or check != _check(keys):
            raise OallamaError(
                f"this is no token of `oallama cluster join`, which has {_LETTERS} letters; got {len(text)}"
            )
        return cls(keys[:KEY_BYTES], keys[KEY_BYTES:])

    def __str__(self) -> str:
        keys = self.client_key + self.host_key
        return _PREFIX + base64.urlsafe_b64encode(keys + _check(keys)).decode().rstrip("=")

    def __repr__(self) -> str:
        return "Token(..)"  # a log is no place for it

    def client_public(self) -> str:
        """The client's public key, a line of OpenSSH's."""
        return _openssh(_private(self.client_key).public_key())

    def host_public(self) -> str:
        """The host's public key, a line of OpenSSH's."""
        return _openssh(library(_ED25519).Ed25519PublicKey.from_public_bytes(self.host_key))


def private_key_file(seed: bytes) -> str:
    """A private key as ssh reads it."""
    serialization = library(_SERIALIZATION)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    return str(_private(seed).private_bytes(*form).decode())


def public_bytes(seed: bytes) -> bytes:
    """The public key of a private one."""
    serialization = library(_SERIALIZATION)
    raw = serialization.Encoding.Raw, serialization.PublicFormat.Raw
    return bytes(_private(seed).public_key().public_bytes(*raw))


def _private(seed: bytes) -> Any:
    return library(_ED25519).Ed25519PrivateKey.from_private_bytes(seed)


def _openssh(public: Any) -> str:
    serialization = library(_SERIALIZATION)
    return str(public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode())


def _check(keys: bytes) -> bytes:
    return zlib.crc32(keys).to_bytes(4, "little")
