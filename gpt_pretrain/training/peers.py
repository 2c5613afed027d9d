"""What a rank knows of the other ranks: who has died or fallen silent or ended with an error, and so why all must end.

`Peers` beats in the launcher's store, torch's own, and reads the beats of other ranks; what a store cannot tell, that a
process is gone rather than silent, it asks the host. `watchdog` acts on it.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError

from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import Process, this_process
from gpt_pretrain.megatron.parallel import on_rank_zero

# A rank says this often that it lives …
BEAT_S = 1.0
# … and after this long without a beat it counts as hung: C code may hold the interpreter while it loads a library.
SILENT_S = 40.0
# Beats that a busy machine's round in the store may take.
_LONG_ROUND = 5
# Where one rank ends with an error, the others find the same one or wait for it for ever.
FOLLOW_S = 15.0
# Has a rank that cannot run Python write its stacks.
STACKS_SIGNAL = signal.SIGUSR2
# The last beat of a rank that has ended, well or with an error.
_LEFT = "left"


@dataclass(kw_only=True, slots=True)
class _Peer:
    """Another rank, as this one knows it."""

    rank: int
    process: Process
    beat: str | None = None
    silent_s: float = 0.0
    gone_at: int | None = None
    """The newest round of beats that had begun when its process was found to be gone."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.process.host}"


class Peers:
    """What this rank knows of others: rank 0 of all, the others of rank 0 and of those on their own host.

    A thread of its own talks to the store, as any answer may take for ever where the store's process hangs. Nobody is
    heard then, and nobody counts as silent. The run ends only if this rank makes no progress either: Ctrl-Z stops
    torchrun with its store, but not the ranks.

    Args:
        launch: This process's place in the run; torch.distributed is open, and every rank builds one.
    """

    def __init__(self, launch: Launch) -> None:
        self._rank = launch.rank
        self._me = this_process()
        self._peers: list[_Peer] = []
        self._beats: dict[int, str] = {}
        self._own_end = self._own_failure = self._end = ""
        self.failure = ""
        """Which rank was the first that ended with an error, and with which; empty as long as none has."""
        self._followed_s = 0.0
        self._rounds_begun = self._rounds_done = self._rounds_read = 0
        self._unanswered_s = 0.0
        self._cut_off = False
        self._leave_by: float | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        if launch.world_size == 1:
            return
        processes: list[Process] = [self._me] * launch.world_size
        torch.distributed.all_gather_object(processes, self._me)
        self._server = f"rank 0 on {processes[0].host}"
        self._peers = [
            _Peer(rank=rank, process=process)
            for rank, process in enumerate(processes)
            if rank != launch.rank and (0 in (rank, launch.rank) or self._me.can_see(process))
        ]
        # The store may have served an earlier start by torchrun, or an earlier job of a sweep.
        token = on_rank_zero(lambda: token_hex(8))
        store = TCPStore(launch.master_addr, launch.master_port, is_master=False, wait_for_workers=False)
        self._store = PrefixStore(f"watchdog/{token}", store)
        self._thread = threading.Thread(target=self._talk, name="peers", daemon=True)
        self._thread.start()

    def _talk(self) -> None:
        try:
            while not self._beat():
                self._wake.wait(BEAT_S if self._leave_by is None else BEAT_S / 10)
                self._wake.clear()
        except DistError:
            self._cut_off = True

    def _beat(self) -> bool:
        """One round: says what this rank has to say, and reads what others have said; true after the last one."""
        self._rounds_begun += 1
        leave_by = self._leave_by
        self._store.set(f"beat/{self._rank}", str(self._rounds_begun) if leave_by is None else _LEFT)
        # The first to say something is heard. An empty string changes nothing and answers what there is.
        self.failure = self._store.compare_set("failure", "", self._own_failure).decode()
        self._end = self._store.compare_set("end", "", self._own_end).decode()
        beats = self._store.multi_get([f"beat/{peer.rank}" for peer in self._peers])
        self._beats = {peer.rank: beat.decode() for peer, beat in zip(self._peers, beats, strict=True)}
        self._rounds_done = self._rounds_begun
        if leave_by is None:
            return False
        # The store may live in rank 0, whose end would cut off the others before they have left, too.
        return self._rank != 0 or set(self._beats.values()) == {_LEFT} or time.monotonic() > leave_by

    def check(self, passed_s: float, idle_s: float) -> str | None:
        """Why the run must end, as far as this rank knows; waits for nothing.

        Args:
            passed_s: Seconds since the last call in which this process ran.
            idle_s: Seconds since this rank's last progress.
        """
        if self._thread is None or self._end:
            return self._end or None
        heard_s = self._heard_s(passed_s)
        for peer in self._peers:
            beat = self._beats.get(peer.rank)
            peer.silent_s = peer.silent_s + heard_s if beat == peer.beat else 0.0
            peer.beat = beat
            if beat == _LEFT:
                continue
            if self._has_died(peer):
                return f"{peer.name} died"
            if peer.silent_s > SILENT_S:
                self._ask_for_stacks(peer)
                return f"{peer.name} has given no sign of life for {SILENT_S:.0f} s"
        if self.failure:
            self._followed_s += passed_s
        if self._followed_s > FOLLOW_S:
            return f"{self.failure}, and other ranks did not"
        return None if self._beats.get(0) == _LEFT else self._problem_of_store(idle_s)

    def _problem_of_store(self, idle_s: float) -> str | None:
        if self._cut_off:
            return f"{self._server} died, or its launcher: the store that connects the ranks is gone"
        if min(self._unanswered_s, idle_s) > SILENT_S:
            return (
                f"the store that connects the ranks, of {self._server} or its launcher, has given no answer for "
                f"{SILENT_S:.0f} s, in which this rank made no progress"
            )
        return None

    def _heard_s(self, passed_s: float) -> float:
        """Seconds up to the newest beats for which the store has answered, since those that were read before."""
        self._unanswered_s += passed_s
        if self._rounds_done == self._rounds_read:
            return 0.0
        # A store that answers after a long time has beats of that time still to come.
        heard_s = min(self._unanswered_s, _LONG_ROUND * BEAT_S)
        self._rounds_read, self._unanswered_s = self._rounds_done, 0.0
        return heard_s

    def _has_died(self, peer: _Peer) -> bool:
        if not self._me.can_see(peer.process) or not peer.process.has_ended():
            return False
        if peer.gone_at is None:
            peer.gone_at = self._rounds_begun
            self._wake.set()
        # It may have left: a round that began after its end has read its last beat.
        return self._cut_off or self._rounds_done > peer.gone_at

    def _ask_for_stacks(self, peer: _Peer) -> None:
        if self._me.can_see(peer.process):
            # It may end at this moment.
            with suppress(ProcessLookupError):
                os.kill(peer.process.process, STACKS_SIGNAL)

    def news(self) -> str | None:
        """What has happened to another rank, if anything has; what is on its way has a moment to arrive."""
        until = time.monotonic() + 2 * BEAT_S
        while (why := self.failure or self.check(0.0, 0.0)) is None and self._peers and time.monotonic() < until:
            time.sleep(BEAT_S / 20)
        return why

    def end_run(self, why: str) -> None:
        """Tells all ranks why the run ends."""
        self._own_end = " ".join(why.split())
        self._wake.set()

    def leave(self, failure: str | None) -> None:
        """Says that this rank has ended; on rank 0 waits a little for the others to end, too.

        Args:
            failure: What it ended with; None if it was done.
        """
        if self._thread is None:
            return
        if failure is not None:
            self._own_failure = f"rank {self._rank} on {self._me.host} ended with {' '.join(failure.split())[:500]}"
        self._leave_by = time.monotonic() + (FOLLOW_S if failure is None else 2 * BEAT_S)
        self._wake.set()
        self._thread.join(FOLLOW_S + _LONG_ROUND * BEAT_S)
