from accelerate.monitoring.conclusions import (
    Finding as Finding,
    RunFacts as RunFacts,
    conclude as conclude,
)
from accelerate.monitoring.device_clock import (
    DeviceClock as DeviceClock,
    TimedEvents as TimedEvents,
)
from accelerate.monitoring.ranks import (
    Comparisons as Comparisons,
    RankSummary as RankSummary,
    Straggler as Straggler,
    children_of as children_of,
    join_summaries as join_summaries,
    own_seconds as own_seconds,
    summary_of as summary_of,
)
from accelerate.monitoring.record_thread import (
    RecordThread as RecordThread,
    warn_no_response as warn_no_response,
)
from accelerate.monitoring.records import (
    FOLDER as FOLDER,
    PATH_SUFFIX as PATH_SUFFIX,
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
    records_folder as records_folder,
)
from accelerate.monitoring.secrets import (
    hide_in_text as hide_in_text,
    hide_secrets as hide_secrets,
    hide_secrets_of_command as hide_secrets_of_command,
)
from accelerate.monitoring.status import (
    STATUS_VARIABLE as STATUS_VARIABLE,
    RankStatus as RankStatus,
    read_statuses as read_statuses,
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
from accelerate.monitoring.view import (
    RunView as RunView,
    render as render,
)
