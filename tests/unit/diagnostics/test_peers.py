"""Whether other processes live."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from torch.distributed import HashStore

from accelerate.diagnostics import Doing, Peers, own_identity
from accelerate.state import StoreChannel


def test_the_living_the_dead_and_those_out_of_sight() -> None:
    own = own_identity()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    channel = StoreChannel(HashStore(), "", {})
    peers = Peers(channel, 0, 6, own)
    Peers(channel, 1, 6, own)
    Peers(channel, 2, 6, replace(own, pid=ended.pid))
    Peers(channel, 3, 6, replace(own, host="far"))
    Peers(channel, 4, 6, own).leave("exited with ValueError")
    dead = f"died without a message (process {ended.pid} on {own.host})"
    assert peers.ended() == {2: dead, 4: "exited with ValueError"}
    states = {rank: peers.silent_state(rank) for rank in peers.others}
    assert [rank for rank, state in states.items() if state.doing == Doing.ENDED] == [2, 4]
    assert states[1].doing == Doing.SILENT
    assert "runs but gives no answer" in states[1].ending
    assert "gives no answer (process" in states[3].ending
    assert "has built no Accelerator yet" in states[5].ending


def test_another_process_with_the_same_number_is_not_the_one() -> None:
    own = own_identity()
    channel = StoreChannel(HashStore(), "", {})
    Peers(channel, 1, 2, replace(own, born=own.born - 100))
    assert list(Peers(channel, 0, 2, own).ended()) == [1]
