"""Experiment trackers: the public names of `accelerate.tracking`."""

from accelerate.tracking.base import GeneralTracker as GeneralTracker
from accelerate.tracking.base import on_main_process as on_main_process
from accelerate.tracking.registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from accelerate.tracking.registry import filter_trackers as filter_trackers
from accelerate.tracking.registry import get_available_trackers as get_available_trackers
from accelerate.tracking.registry import register_tracker_class as register_tracker_class
from accelerate.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
