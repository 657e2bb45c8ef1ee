from accelerate.accelerator import Accelerator as Accelerator
from accelerate.base import DistributedType as DistributedType
from accelerate.local_sgd.base import LocalSGD as LocalSGD
from accelerate.local_sgd.diloco import DiLoCo as DiLoCo
