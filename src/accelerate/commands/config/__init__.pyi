from accelerate.commands.config import (
    cluster as cluster,
    config as config,
    config_utils as config_utils,
    default as default,
    sagemaker as sagemaker,
    update as update,
)
from accelerate.commands.config.config import (
    config_command_parser as config_command_parser,
    get_config_parser as get_config_parser,
    main as main,
)
from accelerate.commands.config.default import default_command_parser as default_command_parser
from accelerate.commands.config.update import update_command_parser as update_command_parser
from accelerate.settings import (
    default_config_file as default_config_file,
    load_config_from_file as load_config_from_file,
)
