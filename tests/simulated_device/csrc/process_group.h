#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// A group whose tensors are on a simulated device, over a group of the host.
c10::intrusive_ptr<c10d::Backend> stage(c10::intrusive_ptr<c10d::Backend> host);

} // namespace sim
