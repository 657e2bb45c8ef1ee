"""Old import path of the progress bar."""

from accelerate.base import is_tqdm_available as is_tqdm_available
from accelerate.display import tqdm as tqdm
from accelerate.state import PartialState as PartialState
