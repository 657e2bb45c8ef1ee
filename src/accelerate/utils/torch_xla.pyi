from accelerate.utils import *
