from accelerate.monitoring.conclusions import (
    Finding as Finding,
    RunFacts as RunFacts,
    conclude as conclude,
)
from accelerate.monitoring.device_clock import (
    DeviceClock as DeviceClock,
    TimedEvents as TimedEvents,
)
from accelerate.monitoring.live_view import (
    RankView as RankView,
    RunReader as RunReader,
    RunView as RunView,
    render as render,
)
from accelerate.monitoring.rank_comparison import (
    Comparisons as Comparisons,
    ComputeSummary as ComputeSummary,
    RankExchange as RankExchange,
    Straggler as Straggler,
    children_of as children_of,
    compute_seconds as compute_seconds,
    join_summaries as join_summaries,
    summarize_rank as summarize_rank,
)
from accelerate.monitoring.record_thread import (
    RecordThread as RecordThread,
    warn_no_response as warn_no_response,
)
from accelerate.monitoring.records import (
    FOLDER as FOLDER,
    PHASES as PHASES,
    RECORDS_VARIABLE as RECORDS_VARIABLE,
    Checkpoint as Checkpoint,
    Conclusion as Conclusion,
    End as End,
    Event as Event,
    RankRecords as RankRecords,
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
    recorded_paths as recorded_paths,
    records_folder as records_folder,
)
from accelerate.monitoring.run_monitor import (
    MonitorSources as MonitorSources,
    RunMonitor as RunMonitor,
    format_table as format_table,
)
from accelerate.monitoring.secrets import (
    hide_in_text as hide_in_text,
    hide_secrets as hide_secrets,
    hide_secrets_of_command as hide_secrets_of_command,
)
from accelerate.monitoring.step_clock import (
    BACKWARD as BACKWARD,
    COLLECTIVES as COLLECTIVES,
    DATA as DATA,
    FORWARD as FORWARD,
    MOVING as MOVING,
    OPTIMIZER as OPTIMIZER,
    OTHER_THREAD as OTHER_THREAD,
    REST as REST,
    SAVING as SAVING,
    ClosedWindow as ClosedWindow,
    RunTimes as RunTimes,
    StepClock as StepClock,
    StepTimes as StepTimes,
)
