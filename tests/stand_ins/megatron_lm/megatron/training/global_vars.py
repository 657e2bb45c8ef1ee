"""The state of a process."""

from types import SimpleNamespace
from typing import Any

from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

STATE = SimpleNamespace(args=None, writer=None, tokenizer=None)


def get_args() -> Any:
    assert STATE.args is not None, "args is not initialized."
    return STATE.args


def set_global_variables(args: Any, build_tokenizer: bool = True) -> None:
    assert STATE.args is None, "args is already initialized."
    STATE.args = args
    if build_tokenizer:
        STATE.tokenizer = SimpleNamespace(
            eod=0, pad=0, vocab_size=args.orig_vocab_size, unique_identifiers={}
        )
    init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )


def get_timers() -> None:
    return None


def get_tokenizer() -> Any:
    return STATE.tokenizer


def get_tensorboard_writer() -> Any:
    return STATE.writer
