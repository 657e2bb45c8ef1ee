"""Experiment trackers: the public names, and those that `accelerate.tracking` has always offered."""

from accelerate.base.enums import LoggerType as LoggerType
from accelerate.base.environ import str_to_bool as str_to_bool
from accelerate.base.packages import is_aim_available as is_aim_available
from accelerate.base.packages import is_clearml_available as is_clearml_available
from accelerate.base.packages import is_comet_ml_available as is_comet_ml_available
from accelerate.base.packages import is_dvclive_available as is_dvclive_available
from accelerate.base.packages import is_mlflow_available as is_mlflow_available
from accelerate.base.packages import is_swanlab_available as is_swanlab_available
from accelerate.base.packages import is_tensorboard_available as is_tensorboard_available
from accelerate.base.packages import is_trackio_available as is_trackio_available
from accelerate.base.packages import is_wandb_available as is_wandb_available
from accelerate.base.versions import compare_versions as compare_versions
from accelerate.logging import get_logger as get_logger
from accelerate.nested import listify as listify
from accelerate.state import PartialState as PartialState
from accelerate.tracking.base import GeneralTracker as GeneralTracker
from accelerate.tracking.base import on_main_process as on_main_process
from accelerate.tracking.registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from accelerate.tracking.registry import filter_trackers as filter_trackers
from accelerate.tracking.registry import get_available_trackers as get_available_trackers
from accelerate.tracking.registry import register_tracker_class as register_tracker_class
from accelerate.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
