from accelerate.diagnostics import watching as watching
from accelerate.diagnostics.arrivals import ArrivalWatch as ArrivalWatch, Message as Message, Note as Note
from accelerate.diagnostics.digest import (
    CAUSES as CAUSES,
    MOST_LINES as MOST_LINES,
    find_cause as find_cause,
    is_telling as is_telling,
    render as render,
    write_report as write_report,
)
from accelerate.diagnostics.hang_report import (
    DEVICE as DEVICE,
    Doing as Doing,
    Limits as Limits,
    Outlet as Outlet,
    RankState as RankState,
    Report as Report,
    compose as compose,
    fold as fold,
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
from accelerate.diagnostics.observation import LoaderWatch as LoaderWatch, Observation as Observation
from accelerate.diagnostics.peers import (
    Events as Events,
    Identity as Identity,
    Peers as Peers,
    own_identity as own_identity,
)
from accelerate.diagnostics.processes import Siblings as Siblings
from accelerate.diagnostics.rank_exchange import RankExchange as RankExchange
from accelerate.diagnostics.run_monitor import (
    RunMonitor as RunMonitor,
    Sources as Sources,
    find_monitor as find_monitor,
    spell_table as spell_table,
    start_monitor as start_monitor,
)
from accelerate.diagnostics.stopping import (
    ALLOCATION_ENDS as ALLOCATION_ENDS,
    PREEMPTION as PREEMPTION,
    SAVE_FILE as SAVE_FILE,
    SECONDS_ALIKE as SECONDS_ALIKE,
    SIGNALS as SIGNALS,
    STOP_FILE as STOP_FILE,
    TIME_IS_UP as TIME_IS_UP,
    TRIGGERS as TRIGGERS,
    Agreement as Agreement,
    SignalNotes as SignalNotes,
    Trigger as Trigger,
    agreement_of_run as agreement_of_run,
    asked as asked,
    deadline as deadline,
    find_sources as find_sources,
    process_age as process_age,
    rounds_between as rounds_between,
    save_file as save_file,
    seldom as seldom,
    stop_file as stop_file,
)
from accelerate.diagnostics.watching import (
    Watchdog as Watchdog,
    read_limits as read_limits,
    watch_arrivals as watch_arrivals,
)
