from accelerate.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate.utils import *
