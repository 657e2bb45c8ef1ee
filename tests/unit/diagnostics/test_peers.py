"""Whether other processes live."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from torch.distributed import HashStore

from accelerate.diagnostics import ENDED, SILENT, HangChannel, Peers, own_identity
from accelerate.state import StoreChannel


def test_the_living_the_dead_and_those_out_of_sight() -> None:
    own = own_identity()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    channel = StoreChannel(HashStore(), "", {})
    board = [HangChannel(channel, rank) for rank in range(6)]
    board[1].introduce(own)
    board[2].introduce(replace(own, pid=ended.pid))
    board[3].introduce(replace(own, host="elsewhere"))
    board[4].introduce(own)
    board[4].leave("exited with ValueError")
    peers = Peers(board[0], own, (1, 2, 3, 4, 5))
    dead = f"died without a word (process {ended.pid} on {own.host})"
    assert peers.ended() == {2: dead, 4: "exited with ValueError"}
    states = {rank: peers.silent_state(rank) for rank in peers.ranks}
    assert [rank for rank, state in states.items() if state.doing == ENDED] == [2, 4]
    assert states[1].doing == SILENT
    assert "lives" in states[1].ending
    assert "gives no answer (process" in states[3].ending
    assert "has built no Accelerator yet" in states[5].ending


def test_another_process_with_the_same_number_is_not_the_one() -> None:
    own = own_identity()
    channel = StoreChannel(HashStore(), "", {})
    HangChannel(channel, 1).introduce(replace(own, born=own.born - 100))
    assert list(Peers(HangChannel(channel, 0), own, (1,)).ended()) == [1]
