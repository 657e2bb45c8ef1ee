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
  pybind11::enum_<sim::Late>(m, "Late")
      .value("none", sim::Late::none)
      .value("all", sim::Late::all)
      .value("default_streams", sim::Late::default_streams);
  m.def("set_late", [](sim::Late late) {
    sim::settings().late = late;
    sim::want_everything();
  });
  m.def("count_launches", [] { return sim::settings().launches.load(); });
  m.def("default_generator", &sim::default_generator);
  m.def("stage", &sim::stage);
}
