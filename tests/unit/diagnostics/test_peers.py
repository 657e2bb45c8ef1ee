"""Whether other processes live."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from torch.distributed import HashStore

from accelerate.diagnostics.hang_report import Activity
from accelerate.diagnostics.peers import Peers, own_identity
from accelerate.state import StoreChannel


def test_processes_are_running_ended_or_on_another_machine() -> None:
    own = own_identity()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    channel = StoreChannel(HashStore(), "", {})
    peers = Peers(channel, 0, 6, own, 4)
    Peers(channel, 1, 6, own, 4)
    Peers(channel, 2, 6, replace(own, pid=ended.pid), 4)
    Peers(channel, 3, 6, replace(own, host="far"), 1)
    Peers(channel, 4, 6, own, 4).leave("exited with ValueError")
    peers.check_local_processes(is_waiting=False)
    dead = f"died without a message (process {ended.pid} on {own.host})"
    assert peers.ended() == {2: dead, 4: "exited with ValueError"}
    states = {state.rank: state for state in peers.silent_states(peers.others)}
    assert [rank for rank, state in states.items() if state.activity == Activity.ENDED] == [2, 4]
    assert states[1].activity == Activity.SILENT
    assert "runs but gives no answer" in states[1].ending
    assert "gives no answer (process" in states[3].ending
    assert "has built no Accelerator yet" in states[5].ending


def test_a_reused_pid_is_another_process() -> None:
    own = own_identity()
    channel = StoreChannel(HashStore(), "", {})
    Peers(channel, 1, 2, replace(own, start_time=own.start_time - 100), 2)
    peers = Peers(channel, 0, 2, own, 2)
    peers.check_local_processes(is_waiting=False)
    assert list(peers.ended()) == [1]


def test_the_lowest_running_rank_reports_for_its_machine() -> None:
    """Its messages are read by a rank of another machine, which sees none of these processes."""
    own, channel = own_identity(), StoreChannel(HashStore(), "", {})
    dead = replace(own, start_time=own.start_time - 100)
    ranks = [Peers(channel, rank, 5, dead if rank in (0, 3) else own, 4) for rank in range(4)]
    far = Peers(channel, 4, 5, replace(own, host="far"), 1)
    ranks[2].check_local_processes(is_waiting=False)
    far.events()
    assert far.ended() == {}
    for _ in range(2):
        ranks[1].check_local_processes(is_waiting=False)
        ranks[2].check_local_processes(is_waiting=True)
        assert far.events().ended == 2
    text = f"died without a message (process {own.pid} on {own.host})"
    assert far.ended() == ranks[2].ended() == {0: text, 3: text}


def test_a_process_that_posted_its_end_has_its_message() -> None:
    own, channel = own_identity(), StoreChannel(HashStore(), "", {})
    peers = Peers(channel, 0, 2, own, 2)
    Peers(channel, 1, 2, replace(own, start_time=own.start_time - 100), 2).leave("exited")
    peers.check_local_processes(is_waiting=False)
    assert peers.ended() == {1: "exited"}
    assert peers.events().ended == 1
