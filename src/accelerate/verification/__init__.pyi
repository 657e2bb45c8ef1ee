from accelerate.verification.comparison import (
    TOLERANCES as TOLERANCES,
    Finding as Finding,
    Run as Run,
    Step as Step,
    Tolerances as Tolerances,
    compare as compare,
    find_traced_step as find_traced_step,
    read_run as read_run,
    tolerances_of as tolerances_of,
    with_cause as with_cause,
)
from accelerate.verification.options import ENTRY as ENTRY, Options as Options
from accelerate.verification.tables import as_json as as_json, format_runs as format_runs
