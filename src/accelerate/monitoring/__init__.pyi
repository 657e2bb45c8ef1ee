from accelerate.monitoring.live_view import RunReader as RunReader, RunView as RunView, render as render
from accelerate.monitoring.rank_comparison import RankExchange as RankExchange
from accelerate.monitoring.record_thread import RecordThread as RecordThread
from accelerate.monitoring.records import (
    FOLDER as FOLDER,
    PHASES as PHASES,
    Attempt as Attempt,
    Checkpoint as Checkpoint,
    Conclusion as Conclusion,
    End as End,
    Event as Event,
    RankTimes as RankTimes,
    Record as Record,
    RecordQueue as RecordQueue,
    RecordWriter as RecordWriter,
    Setting as Setting,
    Start as Start,
    Values as Values,
    Window as Window,
    decode as decode,
    encode as encode,
    find_records as find_records,
    last_step as last_step,
    machine_digest as machine_digest,
    no_records as no_records,
    recorded_paths as recorded_paths,
    recorded_rank as recorded_rank,
    without_host as without_host,
)
from accelerate.monitoring.run_folders import (
    RECORDS_VARIABLE as RECORDS_VARIABLE,
    find_runs as find_runs,
    name_of_run as name_of_run,
    newest_run as newest_run,
    records_folder as records_folder,
    remove_old_runs as remove_old_runs,
    state_folder as state_folder,
    uses_state_folder as uses_state_folder,
)
from accelerate.monitoring.run_monitor import RunMonitor as RunMonitor
from accelerate.monitoring.step_clock import (
    BACKWARD as BACKWARD,
    DATA as DATA,
    FORWARD as FORWARD,
    MOVING as MOVING,
    OPTIMIZER as OPTIMIZER,
    OTHER_THREAD as OTHER_THREAD,
    SAVING as SAVING,
    RunTimes as RunTimes,
    StepClock as StepClock,
    StepTimes as StepTimes,
)
