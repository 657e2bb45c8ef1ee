#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "runtime.h"

namespace sim {

at::Tensor host_tensor(const at::Tensor& tensor); // the same memory, for kernels of the CPU
void resize_storage(const c10::Storage& storage, size_t bytes);

// Random numbers: a device has a generator of the CPU of its own.
const at::Generator& default_generator(int device);
at::Generator host_generator(const c10::IValue& given, int device);

// While it exists, the default generator of the CPU is that of a device; -1: nothing is changed.
class DrawsFromDevice {
 public:
  explicit DrawsFromDevice(int device);
  ~DrawsFromDevice();

 private:
  const int device_;
  at::Tensor before_;
};

} // namespace sim
