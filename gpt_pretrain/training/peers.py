"""Signs of life between the ranks: one connection from every rank to rank 0, beside the training's own.

A process that dies closes its connection, whatever killed it, and rank 0 knows within a second; a node that is lost or
a process that is stopped falls silent. Rank 0 passes on to all ranks why the run must end, and its own death every rank
sees itself. Nothing here touches torch once the ranks are connected: the device and the collectives may be what hangs.
"""

import os
import selectors
import socket
import time
import weakref
from dataclasses import dataclass
from hmac import compare_digest
from secrets import token_hex

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.megatron.parallel import on_rank_zero

# A rank says this often that it lives …
BEAT_S = 2.0
# … and after this long without a word it counts as dead: C code may hold the interpreter while it loads a library.
SILENT_S = 40.0
# Where one rank ends with an error the others find the same one, or wait for it for ever.
FOLLOW_S = 15.0
_CONNECT_S = 60.0
_HELLO_S = 10.0


@dataclass(kw_only=True, slots=True)
class _Peer:
    """A rank at the other end of a connection."""

    rank: int
    host: str
    connection: socket.socket
    received: bytes = b""
    silent_s: float = 0.0
    has_left: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


class Peers:
    """The other ranks as this one hears them: all of them on rank 0, rank 0 alone elsewhere. Every rank builds one.

    Args:
        launch: This process's place in the run.

    Raises:
        UserError: A rank cannot reach rank 0.
    """

    def __init__(self, launch: Launch) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._peers = _connect(launch) if launch.world_size > 1 else []
        for peer in self._peers:
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._heard_at = time.monotonic()
        self._beat_in_s = 0.0
        self._failure: str | None = None
        self._followed_s = 0.0
        # A fork of the rank, whatever makes one, would keep a dead rank's connections open.
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(own))

    def listen(self, timeout_s: float) -> tuple[str | None, float]:
        """Waits for news of the other ranks.

        Args:
            timeout_s: Seconds to wait for it, at most.

        Returns:
            Why the run must end, or None; and the seconds since the last call. Time in which this process was stopped
            (a suspended job, a laptop's lid) is not among them, as the others were stopped with it.
        """
        news = [key.data for key, _ in self._selector.select(timeout_s)]
        now = time.monotonic()
        passed_s, self._heard_at = min(now - self._heard_at, 2 * timeout_s), now
        why: str | None = None
        for peer in news:
            if peer is None:
                self._woken.recv(64)
            else:
                why = self._read(peer) or why
        self._beat_in_s -= passed_s
        if self._beat_in_s <= 0:
            self._beat_in_s = BEAT_S
            self._send("alive")
        for peer in self._peers:
            peer.silent_s = 0.0 if peer in news else peer.silent_s + passed_s
            if peer.silent_s > SILENT_S and not peer.has_left:
                why = why or f"{peer.name} has given no sign of life for {SILENT_S:.0f} s"
        if self._failure is not None:
            self._followed_s += passed_s
            if self._followed_s > FOLLOW_S:
                why = why or f"{self._failure}, and other ranks did not"
        return why, passed_s

    def _read(self, peer: _Peer) -> str | None:
        try:
            received = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        if not received:
            self._forget(peer)
            return None if peer.has_left else f"{peer.name} died: its connection broke off"
        *lines, peer.received = (peer.received + received).split(b"\n")
        for line in lines:
            word, _, text = line.decode(errors="replace").partition(" ")
            if word == "end":
                return text
            if word == "done":
                peer.has_left = True
            elif word == "failed":
                peer.has_left = True
                self._failure = self._failure or f"{peer.name} ended with {text}"
                # Only rank 0 hears of it first hand.
                self._send("failure " + self._failure)
            elif word == "failure":
                self._failure = self._failure or text
        return None

    def _forget(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.remove(peer)

    def _send(self, line: str) -> None:
        for peer in self._peers:
            try:
                peer.connection.send(line.encode() + b"\n")
            except OSError:
                # Gone or not reading: what comes from it, or does not come, says so.
                continue

    def first_failure(self) -> str | None:
        """Which other rank was the first that ended with an error, and with which, as far as this one has heard."""
        return self._failure

    def end_run(self, why: str) -> None:
        """Tells the other ranks why the run ends: all of them on rank 0, rank 0 elsewhere, which passes it on."""
        self._send("end " + " ".join(why.split()))

    def leave(self, failure: str | None) -> None:
        """Says that this rank has ended, and closes its connections.

        Args:
            failure: What it ended with; None if it was done.
        """
        self._send("done" if failure is None else "failed " + " ".join(failure.split())[:500])
        self.close()

    def wake(self) -> None:
        """Makes `listen` return at once; for another thread."""
        self._wake.send(b".")

    def close(self) -> None:
        """Closes this process's ends."""
        self._selector.close()
        for peer in self._peers:
            peer.connection.close()
        self._wake.close()
        self._woken.close()


def _close_in_child(own: "weakref.ref[Peers]") -> None:
    peers = own()
    if peers is not None:
        peers.close()


def _connect(launch: Launch) -> list[_Peer]:
    """Connections of rank 0 to all others, of the others to rank 0."""
    opened: list[socket.socket] = []

    def open_port() -> tuple[int, str]:
        family = socket.getaddrinfo(launch.master_addr, None, type=socket.SOCK_STREAM)[0][0]
        opened.append(socket.create_server(("", 0), family=family, backlog=launch.world_size))
        return opened[0].getsockname()[1], token_hex(16)

    port, token = on_rank_zero(open_port)
    if launch.is_rank_zero:
        with opened[0] as server:
            return _accept(server, token, launch.world_size)
    try:
        connection = socket.create_connection((launch.master_addr, port), timeout=_CONNECT_S)
        connection.sendall(f"{token} {launch.rank} {socket.gethostname()}\n".encode())
    except OSError as error:
        raise UserError(
            f"rank {launch.rank} on {socket.gethostname()} cannot reach rank 0 at {launch.master_addr}:{port} "
            f"({error}), where the ranks tell each other that they live; let the nodes connect to each other, or run "
            "without a watchdog: trainer.hang_timeout=null"
        ) from error
    return [_Peer(rank=0, host=launch.master_addr, connection=connection)]


def _accept(server: socket.socket, token: str, world_size: int) -> list[_Peer]:
    deadline = time.monotonic() + _CONNECT_S
    peers: dict[int, _Peer] = {}
    while len(peers) < world_size - 1:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, world_size)) - set(peers))
            raise UserError(
                f"ranks {', '.join(map(str, missing[:8]))} have not reached rank 0 within {_CONNECT_S:.0f} s, where "
                "the ranks tell each other that they live; look at their own output, or run without a watchdog: "
                "trainer.hang_timeout=null"
            ) from None
        peer = _greet(connection, token)
        if peer is None:
            # Somebody else's: whatever knocks on ports in this network.
            connection.close()
        else:
            peers[peer.rank] = peer
    return list(peers.values())


def _greet(connection: socket.socket, token: str) -> _Peer | None:
    connection.settimeout(_HELLO_S)
    hello = b""
    try:
        while not hello.endswith(b"\n") and len(hello) < 1024:
            received = connection.recv(1)
            if not received:
                return None
            hello += received
    except OSError:
        return None
    words = hello.decode(errors="replace").split()
    if len(words) != 3 or not compare_digest(words[0].encode(), token.encode()):
        return None
    return _Peer(rank=int(words[1]), host=words[2], connection=connection)
