"""Old import path of version comparison."""

from accelerate.base.constants import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from accelerate.base.versions import (
    compare_versions as compare_versions,
    is_torch_version as is_torch_version,
)
