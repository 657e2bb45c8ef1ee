from accelerate.verification.comparison import (
    compare as compare,
    find_traced as find_traced,
    with_cause as with_cause,
)
from accelerate.verification.options import ENTRY as ENTRY, Options as Options
from accelerate.verification.records import (
    TOLERANCES as TOLERANCES,
    Finding as Finding,
    Run as Run,
    Step as Step,
    Tolerances as Tolerances,
    read_run as read_run,
    tolerances_of as tolerances_of,
)
from accelerate.verification.tables import as_json as as_json, format_runs as format_runs
