from accelerate.base import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from accelerate.utils import *
