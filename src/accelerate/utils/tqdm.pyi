from accelerate.base import is_tqdm_available as is_tqdm_available
from accelerate.state import PartialState as PartialState
from accelerate.utils import *
