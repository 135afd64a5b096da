"""What `oallama cluster join` runs: an SSH server that starts the agent (pipeline/agent.py) for who has the token.

It runs nothing else, opens no terminal, copies no file, and forwards to two ports of its own loopback alone: those of
the RPC server and of the echo. One client at a time has the host.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from oallama.base.children import die_with_parent
from oallama.errors import OallamaError

from ..pipeline.agent import PROGRAM, Offer
from .keys import OwnKeys
from .known import echo_port, rpc_port
from .token import library, private_key_file

LOGIN_S = 5.0  # for a peer to show the token
MOST_STRANGERS = 16  # peers at once that have not shown it
KEEPALIVE_S = 5.0
END_S = 3.0  # for an agent to end by itself


class JoinedHost:
    """Serves clients at `address` until it is stopped.

    offer: what clients may use. notice: is told, in a line, who comes and goes.
    """

    def __init__(self, address: tuple[str, int], keys: OwnKeys, offer: Offer, notice: Callable[[str], None]) -> None:
        self._address, self._keys, self._offer, self._notice = address, keys, offer, notice
        self._strangers: list[Any] = []  # connections of peers that have not shown the token, the oldest first
        self._client = ""  # who has the host now
        self._agent: asyncio.Task[Any] | None = None  # answers that client
        self._stopped: asyncio.Task[Any]  # of serve(): ends with the first SIGINT or SIGTERM

    async def serve(self, ready: Callable[[], None]) -> None:
        """Listen until SIGINT or SIGTERM. ready: is called when clients can come.

        Raises:
            OallamaError: when it cannot listen there.
        """
        ssh, host = library("asyncssh"), self
        known = ssh.import_public_key(self._keys.token.client_public())

        class Peer(ssh.SSHServer):  # type: ignore[misc, name-defined]
            def connection_made(self, connection: Any) -> None:
                self._connection = connection
                host._strangers.append(connection)
                if len(host._strangers) > MOST_STRANGERS:
                    host._strangers.pop(0).abort()

            def connection_lost(self, _: Exception | None) -> None:
                self._no_stranger()

            def public_key_auth_supported(self) -> bool:
                return True

            def validate_public_key(self, _: str, key: Any) -> bool:
                return bool(key == known)

            def auth_completed(self) -> None:
                self._no_stranger()

            def _no_stranger(self) -> None:
                with suppress(ValueError):
                    host._strangers.remove(self._connection)

            def connection_requested(self, address: str, port: int, *_: Any) -> bool:
                own = host._address[1]
                return address == "127.0.0.1" and port in (rpc_port(own), echo_port(own))

        try:
            server = await ssh.create_server(
                Peer,
                *self._address,
                server_host_keys=[ssh.import_private_key(private_key_file(self._keys.host_key))],
                process_factory=self._start_agent,
                encoding=None,
                login_timeout=LOGIN_S,
                keepalive_interval=KEEPALIVE_S,
                allow_pty=False,
                agent_forwarding=False,
                reuse_address=True,
            )
        except OSError as error:
            where = f"{self._address[0]}:{self._address[1]}"
            raise OallamaError(f"cannot listen on {where}: {error.strerror}; has this host joined already?") from None
        signalled = asyncio.Event()
        self._stopped = asyncio.create_task(signalled.wait())
        ready()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, signalled.set)
        await self._stopped
        server.close()
        if self._agent:  # cancelled while it starts, a process of asyncio's is waited for without end
            await asyncio.wait({self._agent}, timeout=END_S)

    async def _start_agent(self, process: Any) -> None:
        """Answers the one command that there is."""
        peer = process.get_extra_info("peername")[0]
        if shlex.split(process.command or "")[1:] != ["-m", PROGRAM]:
            self._refuse(process, "this host runs oallama's agent alone")
        elif self._stopped.done():
            self._refuse(process, "this host is leaving")
        elif self._client:
            self._refuse(process, f"this host serves a client at {self._client}, and one at a time")
        else:
            self._client, self._agent = peer, asyncio.current_task()
            self._notice(f"a client at {peer} uses this host")
            try:
                await self._run_agent(process)
            finally:
                self._client, self._agent = "", None
                self._notice(f"the client at {peer} has left")

    def _refuse(self, process: Any, why: str) -> None:
        process.stderr.write(f"{why}\n".encode())
        process.exit(1)

    async def _run_agent(self, process: Any) -> None:
        pipe = asyncio.subprocess.PIPE
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", PROGRAM, json.dumps(asdict(self._offer))),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        try:
            await process.redirect(stdin=agent.stdin, stdout=agent.stdout, stderr=agent.stderr)
            left = asyncio.create_task(process.wait_closed())
            ended = asyncio.create_task(agent.wait())
            await asyncio.wait({left, ended, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                process.exit(agent.returncode)
                await left
            elif not self._stopped.done():
                await asyncio.wait({ended}, timeout=END_S)
        finally:
            with suppress(ProcessLookupError):
                agent.kill()
            await agent.wait()
