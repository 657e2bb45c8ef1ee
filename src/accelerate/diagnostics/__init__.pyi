from accelerate.diagnostics import watching as watching
from accelerate.diagnostics.arrivals import (
    ArrivalWatch as ArrivalWatch,
    Message as Message,
    WaitingRank as WaitingRank,
)
from accelerate.diagnostics.digest import (
    CAUSES as CAUSES,
    MAX_LINES as MAX_LINES,
    find_cause as find_cause,
    format_screen as format_screen,
    is_informative as is_informative,
    write_report as write_report,
)
from accelerate.diagnostics.hang_report import (
    DEVICE as DEVICE,
    Activity as Activity,
    HangReporter as HangReporter,
    Limits as Limits,
    RankState as RankState,
    Report as Report,
    format_report as format_report,
    group_states as group_states,
    is_hang as is_hang,
    odd_groups as odd_groups,
)
from accelerate.diagnostics.memory import (
    CLEAR_REFS as CLEAR_REFS,
    MIB as MIB,
    MemoryMeter as MemoryMeter,
    PeakMemory as PeakMemory,
    find_executable_batch_size as find_executable_batch_size,
    should_reduce_batch_size as should_reduce_batch_size,
    snapshot_on_exhaustion as snapshot_on_exhaustion,
)
from accelerate.diagnostics.observation import LoaderWatch as LoaderWatch, ThreadObserver as ThreadObserver
from accelerate.diagnostics.peers import (
    EventCounts as EventCounts,
    Identity as Identity,
    Peers as Peers,
    own_identity as own_identity,
)
from accelerate.diagnostics.processes import Siblings as Siblings
from accelerate.diagnostics.stopping import (
    ALLOCATION_ENDS as ALLOCATION_ENDS,
    PREEMPTION as PREEMPTION,
    REPEAT_SECONDS as REPEAT_SECONDS,
    REQUEST_TYPES as REQUEST_TYPES,
    SAVE_FILE as SAVE_FILE,
    SIGNALS as SIGNALS,
    STOP_FILE as STOP_FILE,
    TIME_IS_UP as TIME_IS_UP,
    RequestType as RequestType,
    SignalRecorder as SignalRecorder,
    StopRequests as StopRequests,
    deadline as deadline,
    find_sources as find_sources,
    get_stop_requests as get_stop_requests,
    process_age as process_age,
    read_requests as read_requests,
    save_file as save_file,
    steps_between as steps_between,
    stop_file as stop_file,
    throttled as throttled,
)
from accelerate.diagnostics.watching import (
    Watchdog as Watchdog,
    read_limits as read_limits,
    watch_arrivals as watch_arrivals,
)
