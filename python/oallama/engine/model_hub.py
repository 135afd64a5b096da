"""Models by their name on Hugging Face: `hf:OWNER/REPO`, `hf:OWNER/REPO:FILE.gguf` or `hf:OWNER/REPO:Q4_K_M`.

huggingface_hub finds, downloads and keeps the files: in its own cache, resumed after an interruption, and one of two
processes that want the same file waits for the other one. Its variables hold (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import OallamaError

PREFIX = "hf:"
HUB_NAME = re.compile(r"hf:[\w.-]+/[\w.-]+(:[^\s:]+)?")
_FORM = "hf:OWNER/REPO, hf:OWNER/REPO:FILE.gguf or hf:OWNER/REPO:Q4_K_M"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_SHOWN = 12  # names in a message
_CONNECT_S = 10.0


def hub_model(name: str) -> Path:
    """The file of a model on Hugging Face, of a divided one the first of its files; what is missing is downloaded.

    What was downloaded before is taken as it is, without asking whether there is a newer one.

    Raises:
        OallamaError: no such repository or file, none or several that fit, huggingface_hub is missing, or there is no
            network and the file was not downloaded before.
    """
    hub = _hub()
    repo, _, which = name.removeprefix(PREFIX).partition(":")
    try:
        if repo.count("/") != 1:
            raise ValueError("no owner")
        hub.utils.validate_repo_id(repo)
    except ValueError:
        raise OallamaError(f"{name!r} is no model on Hugging Face; expected {_FORM}") from None
    folder = _downloaded(hub, repo)
    if folder and which and (there := _complete(name, folder, which, exactly=True)):
        return there
    try:
        _check_network(hub.constants.ENDPOINT)
        files = hub.HfApi().list_repo_files(repo)
        parts = _chosen(name, [file for file in files if file.endswith(".gguf")], which)
        downloaded = [Path(hub.hf_hub_download(repo, file)) for file in parts]
        return downloaded[0]
    except hub.errors.RepositoryNotFoundError:
        raise OallamaError(f"Hugging Face has no repository {repo!r}, or HF_TOKEN does not open it") from None
    except OallamaError:
        raise
    except Exception as error:  # of the library, of the HTTP library below it, of the network or of the disk
        if folder and (there := _complete(name, folder, which, exactly=False)):
            return there
        reason = str(error).split("\n")[0]
        raise OallamaError(f"{name} was not downloaded before, and cannot be now: {reason}") from None


def _complete(name: str, folder: Path, which: str, exactly: bool) -> Path | None:
    """The model among files that were downloaded before; None where none fits, several do, or a part is missing."""
    there = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    with suppress(OallamaError):
        parts = _chosen(name, there, which, exactly)
        if all((folder / part).exists() for part in parts):
            return folder / parts[0]
    return None


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise OallamaError("models from Hugging Face need huggingface_hub: pip install oallama[hub]") from None
    return huggingface_hub


def _downloaded(hub: Any, repo: str) -> Path | None:
    """Where files of the repository are that were downloaded before."""
    with suppress(hub.errors.LocalEntryNotFoundError):
        return Path(hub.snapshot_download(repo, local_files_only=True))
    return None


def _check_network(endpoint: str) -> None:
    """Raises OSError where the server cannot be reached: huggingface_hub tries for half a minute."""
    url = urlsplit(endpoint)
    if not getproxies().get(url.scheme):
        port = url.port or {"http": 80}.get(url.scheme, 443)
        socket.create_connection((url.hostname, port), timeout=_CONNECT_S).close()


def _chosen(name: str, files: Sequence[str], which: str, exactly: bool = False) -> list[str]:
    """The files of the model that `which` names: all parts of a divided one, the first one first.

    A quantisation is looked for as it is ("Q6_K"), then, unless `exactly`, as the beginning of others ("Q6_K_L").
    """
    firsts = [file for file in sorted(files) if not (part := _PART.search(file)) or int(part[1]) == 1]
    models = [file for file in firsts if "mmproj" not in file]  # without encoders of pictures
    ways = [[file for file in firsts if file == which], _named(models, which, "A-Za-z0-9_")]
    if not exactly:
        ways.append(_named(models, which, "A-Za-z0-9"))
    found = next(filter(None, ways), [])
    if len(found) != 1:
        there = ", ".join(firsts[:_SHOWN]) + (", .." if len(firsts) > _SHOWN else "")
        how_many = "no file fits" if not found else f"{len(found)} files fit"
        raise OallamaError(f"{name}: {how_many}; the repository has {there or 'no GGUF file'}")
    part = _PART.search(found[0])
    if not part:
        return found
    stem = found[0][: part.start()]
    return [f"{stem}-{i:05d}-of-{part[2]}.gguf" for i in range(1, int(part[2]) + 1)]


def _named(files: Sequence[str], which: str, letters: str) -> list[str]:
    """Those whose name has `which` with none of these letters after it; all for ""."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(which)}(?![{letters}])", re.IGNORECASE)
    return [file for file in files if not which or word.search(_PART.sub("", file).removesuffix(".gguf"))]
