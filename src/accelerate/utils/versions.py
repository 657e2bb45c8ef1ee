"""Old import path of version comparison."""

from accelerate.base import (
    STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC,
    compare_versions as compare_versions,
    is_torch_version as is_torch_version,
)
