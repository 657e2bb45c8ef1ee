from accelerate.strategies.base import (
    Strategy as Strategy,
    refuse_split_model as refuse_split_model,
)
from accelerate.strategies.buckets import adopt_order as adopt_order, order_of as order_of
from accelerate.strategies.bundle import (
    Bundle as Bundle,
    Kind as Kind,
    is_prepared as is_prepared,
    kind_of as kind_of,
    mark_prepared as mark_prepared,
    parameter_ids as parameter_ids,
)
from accelerate.strategies.ddp import DataParallel as DataParallel, sync_in_backward as sync_in_backward
from accelerate.strategies.exchange import exchanging as exchanging
from accelerate.strategies.ownership import find_orphans as find_orphans, find_strangers as find_strangers
from accelerate.strategies.request import Context as Context, RunRequest as RunRequest
from accelerate.strategies.resolve import resolve_strategy as resolve_strategy
from accelerate.strategies.session import (
    Prepared as Prepared,
    PrepareSession as PrepareSession,
    ReplacedParameters as ReplacedParameters,
)
from accelerate.strategies.single import SingleProcess as SingleProcess
from accelerate.strategies.tensor_parallel import (
    CopiedTensorParallel as CopiedTensorParallel,
    TensorParallel as TensorParallel,
)
