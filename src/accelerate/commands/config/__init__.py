"""`accelerate config` and what it writes and loads."""

from accelerate.commands.config.config import config_command_parser as config_command_parser
from accelerate.commands.config.config import get_config_parser as get_config_parser
from accelerate.commands.config.config import main as main
from accelerate.commands.config.config_args import default_config_file as default_config_file
from accelerate.commands.config.config_args import load_config_from_file as load_config_from_file
from accelerate.commands.config.default import default_command_parser as default_command_parser
from accelerate.commands.config.update import update_command_parser as update_command_parser
