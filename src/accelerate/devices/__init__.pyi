from accelerate.devices.affinity import (
    override_numa_affinity as override_numa_affinity,
    parse_cpu_list as parse_cpu_list,
    set_numa_affinity as set_numa_affinity,
)
from accelerate.devices.availability import (
    USE_TORCH_XLA as USE_TORCH_XLA,
    is_bf16_available as is_bf16_available,
    is_cuda_available as is_cuda_available,
    is_fp8_available as is_fp8_available,
    is_fp16_available as is_fp16_available,
    is_habana_gaudi1 as is_habana_gaudi1,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_rocm_available as is_rocm_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_distributed_available as is_torch_distributed_available,
    is_torch_xla_available as is_torch_xla_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    is_triton_available as is_triton_available,
    is_xccl_available as is_xccl_available,
    is_xpu_available as is_xpu_available,
)
from accelerate.devices.backend import CpuBackend as CpuBackend, DeviceBackend as DeviceBackend
from accelerate.devices.hardware_table import (
    BACKENDS as BACKENDS,
    CPU as CPU,
    CUDA as CUDA,
    HPU as HPU,
    MPS as MPS,
    NPU as NPU,
    XLA as XLA,
    count_visible as count_visible,
    detect as detect,
    get_current_device_type as get_current_device_type,
    named as named,
    of_device as of_device,
)
from accelerate.devices.memory import (
    clear_device_cache as clear_device_cache,
    release_memory as release_memory,
)
from accelerate.devices.nvidia import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    get_driver_version as get_driver_version,
    get_gpu_info as get_gpu_info,
)
from accelerate.devices.xla import (
    RowSharding as RowSharding,
    count_chips as count_chips,
    install_xla as install_xla,
    mark_step as mark_step,
    row_axes as row_axes,
    share_rows as share_rows,
    upload_options as upload_options,
    use_mesh as use_mesh,
)
