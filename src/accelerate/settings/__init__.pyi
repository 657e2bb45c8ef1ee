from accelerate.settings.config_file import (
    SCHEMA_FILE as SCHEMA_FILE,
    BaseConfig as BaseConfig,
    ClusterConfig as ClusterConfig,
    SageMakerConfig as SageMakerConfig,
    cache_dir as cache_dir,
    check as check,
    default_config_file as default_config_file,
    default_config_path as default_config_path,
    default_json_config_file as default_json_config_file,
    default_yaml_config_file as default_yaml_config_file,
    existing_file as existing_file,
    find_config_file as find_config_file,
    hf_cache_home as hf_cache_home,
    load_config_from_file as load_config_from_file,
    make_config as make_config,
    read_layer as read_layer,
    read_mapping as read_mapping,
    to_text as to_text,
    write_mapping as write_mapping,
)
from accelerate.settings.deepspeed_checks import (
    AUTO as AUTO,
    KEYS as KEYS,
    STAGE as STAGE,
    USUAL as USUAL,
    find_node as find_node,
    likely_typos as likely_typos,
    look_up as look_up,
    problems_of_counts as problems_of_counts,
    read_config as read_config,
    refuse_config as refuse_config,
    straighten as straighten,
)
from accelerate.settings.env import (
    decode as decode,
    nodes_of as nodes_of,
    read as read,
    read_fields as read_fields,
    read_with_problems as read_with_problems,
)
from accelerate.settings.layers import (
    BUILT_IN as BUILT_IN,
    ENVIRONMENT as ENVIRONMENT,
    FLAG as FLAG,
    SECTIONS as SECTIONS,
    Layer as Layer,
    Settings as Settings,
    all_options as all_options,
    merge_layers as merge_layers,
)
from accelerate.settings.migrations import (
    ARGUMENT_KEY_MAPPING as ARGUMENT_KEY_MAPPING,
    ARGUMENT_VALUE_MAPPING as ARGUMENT_VALUE_MAPPING,
    STRATEGY_NOTES as STRATEGY_NOTES,
    ConversionStatus as ConversionStatus,
    convert_config_to_fsdp2 as convert_config_to_fsdp2,
    fsdp2_notes as fsdp2_notes,
    retired_variables as retired_variables,
)
from accelerate.settings.option import Option as Option, Section as Section, refuse_all as refuse_all
from accelerate.settings.parser import (
    CustomArgumentGroup as CustomArgumentGroup,
    CustomArgumentParser as CustomArgumentParser,
    CustomHelpFormatter as CustomHelpFormatter,
    OneSpellingFormatter as OneSpellingFormatter,
    clean_option as clean_option,
    options_to_group as options_to_group,
    subcommands as subcommands,
)
from accelerate.settings.parsing import parse_json as parse_json
from accelerate.settings.questions import (
    Prompt as Prompt,
    Questionnaire as Questionnaire,
    TerminalPrompt as TerminalPrompt,
    as_mapping as as_mapping,
    prompt_of_this_process as prompt_of_this_process,
)
