from accelerate.base import (
    LoggerType as LoggerType,
    compare_versions as compare_versions,
    is_aim_available as is_aim_available,
    is_clearml_available as is_clearml_available,
    is_comet_ml_available as is_comet_ml_available,
    is_dvclive_available as is_dvclive_available,
    is_mlflow_available as is_mlflow_available,
    is_swanlab_available as is_swanlab_available,
    is_tensorboard_available as is_tensorboard_available,
    is_trackio_available as is_trackio_available,
    is_wandb_available as is_wandb_available,
    str_to_bool as str_to_bool,
)
from accelerate.logging import get_logger as get_logger
from accelerate.nested import listify as listify
from accelerate.state import PartialState as PartialState
from accelerate.tracking.base import (
    GeneralTracker as GeneralTracker,
    Silence as Silence,
    flatten as flatten,
    on_main_process as on_main_process,
    plain as plain,
)
from accelerate.tracking.mlflow import MLflowTracker as MLflowTracker
from accelerate.tracking.registry import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
    TRACKERS as TRACKERS,
    build_tracker as build_tracker,
    filter_trackers as filter_trackers,
    get_available_trackers as get_available_trackers,
    missing_package as missing_package,
    register_tracker_class as register_tracker_class,
)
from accelerate.tracking.report import ReportTracker as ReportTracker
from accelerate.tracking.runs import (
    AimTracker as AimTracker,
    ClearMLTracker as ClearMLTracker,
    CometMLTracker as CometMLTracker,
    DVCLiveTracker as DVCLiveTracker,
    SwanLabTracker as SwanLabTracker,
    TensorBoardTracker as TensorBoardTracker,
    TrackioTracker as TrackioTracker,
    WandBTracker as WandBTracker,
)
from accelerate.tracking.senders import (
    Record as Record,
    Senders as Senders,
    Snapshot as Snapshot,
    read_snapshot as read_snapshot,
    take_snapshot as take_snapshot,
)
