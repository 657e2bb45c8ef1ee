from accelerate.strategies.xla.exchange import Exchange as Exchange, XlaOptimizer as XlaOptimizer
from accelerate.strategies.xla.replicas import XlaReplicas as XlaReplicas
from accelerate.strategies.xla.sharded import (
    XlaFullyShard as XlaFullyShard,
    XlaFullySharded as XlaFullySharded,
)
from accelerate.strategies.xla.units import (
    find_units as find_units,
    policy_of as policy_of,
    refuse_unknown as refuse_unknown,
)
