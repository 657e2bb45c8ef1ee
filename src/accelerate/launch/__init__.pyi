from accelerate.launch.attempts import keep as keep, open_folder as open_folder
from accelerate.launch.children import (
    FORWARDED as FORWARDED,
    GRACE_VARIABLE as GRACE_VARIABLE,
    NOTES as NOTES,
    SIGKILL as SIGKILL,
    grace as grace,
    run_child as run_child,
)
from accelerate.launch.failures import (
    FOLDER_VARIABLE as FOLDER_VARIABLE,
    HANG as HANG,
    HANG_KIND as HANG_KIND,
    CheckpointReports as CheckpointReports,
    Failure as Failure,
    Kind as Kind,
    NewestCheckpoint as NewestCheckpoint,
    Outcome as Outcome,
    Suspect as Suspect,
    collect as collect,
    count_of as count_of,
    find_first as find_first,
    record_digest as record_digest,
    shortened as shortened,
    starts_again as starts_again,
)
from accelerate.launch.layout import device_ids as device_ids, wrong_option as wrong_option
from accelerate.launch.machine import (
    DEFAULT_PORT as DEFAULT_PORT,
    KEY_VARIABLE as KEY_VARIABLE,
    LOOPBACK as LOOPBACK,
    Machine as Machine,
    get_free_port as get_free_port,
    hold_loopback_store as hold_loopback_store,
    is_port_in_use as is_port_in_use,
    is_run_id as is_run_id,
    look as look,
    loopback_interface as loopback_interface,
    new_run_id as new_run_id,
    read_file as read_file,
    run_id_of as run_id_of,
    run_key as run_key,
)
from accelerate.launch.plan import (
    FIRST_STEP as FIRST_STEP,
    LAUNCH_COMMAND as LAUNCH_COMMAND,
    RECORDED as RECORDED,
    LaunchPlan as LaunchPlan,
    Target as Target,
    arrived_key as arrived_key,
    begun_key as begun_key,
    committed_key as committed_key,
    env_var_path_add as env_var_path_add,
    has_steps as has_steps,
    local_command as local_command,
    read_life as read_life,
    record_failures as record_failures,
)
from accelerate.launch.printed_views import printed_views as printed_views
from accelerate.launch.resolve import (
    as_json as as_json,
    as_text as as_text,
    choose_cpu_or_devices as choose_cpu_or_devices,
    choose_launcher as choose_launcher,
    resolve_plan as resolve_plan,
)
from accelerate.launch.script import (
    RENDEZVOUS_FILE as RENDEZVOUS_FILE,
    SCRIPT as SCRIPT,
    PrepareForLaunch as PrepareForLaunch,
    run_script as run_script,
)
