from accelerate.launch.children import (
    CONSOLE_EVENTS as CONSOLE_EVENTS,
    FORWARDED as FORWARDED,
    GRACE_VARIABLE as GRACE_VARIABLE,
    NOTES as NOTES,
    REQUESTS as REQUESTS,
    SIGKILL as SIGKILL,
    ChildExit as ChildExit,
    ChildTerminator as ChildTerminator,
    RequestRecorder as RequestRecorder,
    blocked as blocked,
    exit_code as exit_code,
    grace as grace,
    run_child as run_child,
)
from accelerate.launch.failures import (
    ENTRY as ENTRY,
    FOLDER_VARIABLE as FOLDER_VARIABLE,
    HANG as HANG,
    HANG_KIND as HANG_KIND,
    VERBOSE_VARIABLE as VERBOSE_VARIABLE,
    Exits as Exits,
    Failure as Failure,
    Kind as Kind,
    Outcome as Outcome,
    Suspect as Suspect,
    collect as collect,
    count_of as count_of,
    find_first as find_first,
    find_suspects as find_suspects,
    record_digest as record_digest,
    shortened as shortened,
)
from accelerate.launch.layout import (
    CHOSEN as CHOSEN,
    device_ids as device_ids,
    worker_environment as worker_environment,
    wrong_option as wrong_option,
)
from accelerate.launch.machine import (
    DEFAULT_PORT as DEFAULT_PORT,
    KEY_VARIABLE as KEY_VARIABLE,
    LOOPBACK as LOOPBACK,
    Machine as Machine,
    get_free_port as get_free_port,
    hold_loopback_store as hold_loopback_store,
    is_port_in_use as is_port_in_use,
    look as look,
    loopback_interface as loopback_interface,
    read_file as read_file,
    run_key as run_key,
)
from accelerate.launch.namespace import (
    prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env,
    prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config,
    prepare_multi_gpu_env as prepare_multi_gpu_env,
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env,
    prepare_tpu as prepare_tpu,
    setup_fp8_env as setup_fp8_env,
)
from accelerate.launch.plan import (
    AGENT as AGENT,
    RECORDED as RECORDED,
    LaunchPlan as LaunchPlan,
    Target as Target,
    accelerate_command as accelerate_command,
    env_var_path_add as env_var_path_add,
    folder_of as folder_of,
    local_command as local_command,
    record_failures as record_failures,
    torchrun_arguments as torchrun_arguments,
)
from accelerate.launch.printed_views import printed_views as printed_views
from accelerate.launch.resolve import (
    as_json as as_json,
    as_text as as_text,
    check_engine as check_engine,
    choose_cpu_or_devices as choose_cpu_or_devices,
    choose_starter as choose_starter,
    resolve_plan as resolve_plan,
)
from accelerate.launch.script import (
    RENDEZVOUS_FILE as RENDEZVOUS_FILE,
    PrepareForLaunch as PrepareForLaunch,
    report as report,
)
