"""The launcher of distributed tests, for contracts that need several processes."""

from ..distributed.conftest import rank_server, run

__all__ = ["rank_server", "run"]
