#include <torch/extension.h>

#include <torch/csrc/utils/pybind.h>

#include "kernels.h"
#include "process_group.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using release = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("device_count", &sim::device_count);
  m.def("current_device", &sim::current_device);
  m.def("exchange_device", &sim::exchange_device);
  m.def("is_started", &sim::is_started);
  m.def("is_in_bad_fork", &sim::is_in_bad_fork);
  m.def("synchronize", &sim::synchronize_device, release());
  m.def("shut_down", &sim::shut_down, release());
  m.def("set_memory_limit", &sim::set_memory_limit);
  m.def("set_delay", [](double seconds) { sim::settings().delay = static_cast<int64_t>(seconds * 1e6); });
  m.def("set_late", [](bool late) {
    sim::settings().late = late;
    if (!late)
      sim::want_everything();
  });
  m.def("is_late", [] { return sim::settings().late.load(); });
  m.def("set_poison", [](bool poison) { sim::settings().poison = poison; });
  m.def("count_launches", [] { return sim::settings().launches.load(); });
  m.def("default_generator", &sim::default_generator);
  m.def("stage", &sim::stage);
}
