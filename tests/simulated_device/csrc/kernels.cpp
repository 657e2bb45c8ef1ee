// The operators of torch: each runs as torch's kernel for the CPU, in the thread of a stream.
#include "kernels.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

// Applies a function to the tensors of an argument, also to those in lists.
template <typename Function>
IValue map_tensors(const IValue& value, const Function& function) {
  if (value.isTensor())
    return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector())
      mapped.push_back(function(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    return mapped;
  }
  return value;
}

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

// Python numbers do not change the dtype of a result.
void copy_wrapped_number(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number())
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// One call of an operator with tensors of a simulated device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    const auto given = torch::jit::last(*stack, schema_.arguments().size());
    arguments_.assign(given.begin(), given.end());
    torch::jit::drop(*stack, schema_.arguments().size());
    find_device();
  }

  void run() {
    c10::DeviceGuard guard(c10::Device(kDevice, device_));
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    if (may_run_later() && find_shapes())
      run_later();
    else
      run_now();
  }

 private:
  void find_device() {
    bool has_host_tensor = false;
    for (const IValue& argument : arguments_) {
      if (argument.isDevice() && argument.toDevice().type() == kDevice && device_ < 0)
        device_ = argument.toDevice().has_index() ? argument.toDevice().index() : current_device();
      map_tensors(argument, [&](const Tensor& tensor) {
        if (is_here(tensor)) {
          const bool is_other = has_tensor_ && tensor.device().index() != device_;
          TORCH_CHECK(!is_other, "Expected all tensors to be on the same device, but found at least two devices, ",
                      c10::Device(kDevice, device_), " and ", tensor.device(), "! (", schema_.name(), ")");
          device_ = tensor.device().index();
          has_tensor_ = true;
        } else if (tensor.defined() && tensor.dim() > 0) {
          has_host_tensor = true;
        }
        return tensor;
      });
    }
    const bool takes_indices = schema_.name().find("index") != std::string::npos;
    TORCH_CHECK(!has_host_tensor || takes_indices || !has_tensor_,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                c10::Device(kDevice, device_), " and cpu! (", schema_.name(), ")");
    if (device_ < 0)
      device_ = current_device();
  }

  // Random numbers are drawn, and sizes that depend on data are found, by the caller.
  bool may_run_later() const {
    if (op_.hasTag(at::Tag::nondeterministic_seeded) || op_.hasTag(at::Tag::data_dependent_output) ||
        op_.hasTag(at::Tag::dynamic_output_shape))
      return false;
    for (const c10::Argument& argument : schema_.arguments())
      if (argument.type()->str() == "Generator?")
        return false;
    for (const c10::Argument& result : schema_.returns())
      if (result.type()->kind() != c10::TypeKind::TensorType &&
          !result.type()->isSubtypeOf(*c10::ListType::ofTensors()))
        return false;
    return has_tensor_;
  }

  // Runs the operator on the meta device, which also finds wrong arguments; false where it cannot.
  bool find_shapes() {
    Stack stack;
    for (const IValue& argument : arguments_) {
      if (argument.isDevice())
        stack.emplace_back(c10::Device(c10::kMeta));
      else
        stack.push_back(map_tensors(argument, [](const Tensor& tensor) {
          if (!is_here(tensor))
            return tensor;
          Tensor shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
          copy_wrapped_number(tensor, shape);
          return shape;
        }));
    }
    const Stack shapes = stack;
    try {
      op_.callBoxed(&stack);
    } catch (const std::exception&) {
      return false; // the kernel for the CPU raises the error that the caller gets
    }
    for (size_t i = 0; i < shapes.size(); ++i)
      if (is_written(schema_.arguments()[i]) && shapes[i].isTensor() && arguments_[i].toTensor().defined() &&
          shapes[i].toTensor().sizes() != arguments_[i].toTensor().sizes())
        arguments_[i].toTensor().resize_(shapes[i].toTensor().sizes());
    shapes_ = std::move(stack);
    return true;
  }

  IValue on_host(const IValue& argument) const {
    if (argument.isDevice())
      return c10::Device(c10::kCPU);
    return map_tensors(argument, [](const Tensor& tensor) {
      return is_here(tensor) || !tensor.defined() ? host_tensor(tensor) : tensor.clone();
    });
  }

  void run_later() {
    Stack inputs, views;
    std::vector<std::pair<Tensor, Tensor>> outputs;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      inputs.push_back(on_host(arguments_[i]));
      if (schema_.arguments()[i].is_out() && inputs.back().isTensor()) { // kernels may resize it more than once
        const Tensor view = inputs.back().toTensor();
        outputs.emplace_back(view, at::empty({0}, view.options()));
        inputs.back() = outputs.back().second;
      }
    }
    for (size_t i = 0; i < shapes_.size(); ++i) {
      if (push_alias(i)) {
        views.emplace_back();
        continue;
      }
      const IValue result = map_tensors(shapes_[i], [&](const Tensor& shape) {
        if (!shape.defined())
          return shape;
        return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(here()));
      });
      stack_->push_back(result);
      views.push_back(map_tensors(result, host_tensor));
    }
    const auto op = op_;
    current_stream(device_).launch([op, inputs, views, outputs]() mutable {
      op.callBoxed(&inputs);
      for (const auto& [view, output] : outputs)
        view.copy_(output);
      for (size_t i = 0; i < views.size(); ++i)
        fill(views[i], inputs[i]);
    });
  }

  static void fill(const IValue& view, const IValue& result) {
    if (view.isTensor() && view.toTensor().defined())
      view.toTensor().copy_(result.toTensor());
    else if (view.isTensorList())
      for (size_t i = 0; i < view.toListRef().size(); ++i)
        view.toListRef()[i].toTensor().copy_(result.toListRef()[i].toTensor());
  }

  void run_now() {
    Stream& stream = current_stream(device_);
    stream.wait();
    Stack values;
    std::vector<std::pair<Tensor, Tensor>> to_resize;
    const bool draws = op_.hasTag(at::Tag::nondeterministic_seeded);
    bool has_generator = false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const bool is_generator = schema_.arguments()[i].type()->str() == "Generator?";
      const bool is_out = schema_.arguments()[i].is_out();
      has_generator = has_generator || is_generator;
      if (is_generator && draws) {
        values.emplace_back(host_generator(arguments_[i], device_));
      } else if (is_out && is_here(arguments_[i].toTensor()) && arguments_[i].toTensor().numel() == 0) {
        const Tensor& out = arguments_[i].toTensor();
        to_resize.emplace_back(out, at::empty({0}, out.options().device(c10::kCPU)));
        values.emplace_back(to_resize.back().second);
      } else {
        values.push_back(on_host(arguments_[i]));
      }
    }
    {
      DrawsFromDevice draw(draws && !has_generator ? device_ : -1);
      op_.callBoxed(&values);
    }
    for (auto& [out, value] : to_resize) {
      out.resize_(value.sizes());
      copy_later(value, out);
    }
    for (size_t i = 0; i < values.size(); ++i) {
      if (push_alias(i))
        continue;
      stack_->push_back(map_tensors(values[i], [&](const Tensor& value) {
        if (!value.defined() || !value.device().is_cpu())
          return value;
        Tensor result = at::empty_strided(value.sizes(), value.strides(), value.options().device(here()));
        copy_later(value, result);
        return result;
      }));
    }
  }

  void copy_later(const Tensor& value, const Tensor& to) {
    const Tensor view = host_tensor(to);
    current_stream(device_).launch([value, view] { view.copy_(value); });
  }

  // Where a result is one of the arguments, returns that argument.
  bool push_alias(size_t index) {
    const c10::AliasInfo* alias = schema_.returns()[index].alias_info();
    if (!alias)
      return false;
    TORCH_CHECK(alias->isWrite(), schema_.name(), " returns a view, which the simulated device does not have");
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const c10::AliasInfo* other = schema_.arguments()[i].alias_info();
      if (other && other->beforeSets() == alias->beforeSets()) {
        stack_->push_back(arguments_[i]);
        return true;
      }
    }
    return false;
  }

  c10::Device here() const { return c10::Device(kDevice, device_); }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  Stack arguments_, shapes_;
  int device_ = -1;
  bool has_tensor_ = false;
};

void run_boxed(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

c10::OperatorHandle find(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

void convolve(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = find("aten::convolution");
  run_boxed(op, stack);
}

void convolve_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = find("aten::convolution_backward");
  const Tensor weight = stack->at(stack->size() - 8).toTensor();
  const Tensor gradient = stack->at(stack->size() - 10).toTensor();
  stack->insert(stack->end() - 7, IValue(std::vector<int64_t>{gradient.size(1)}));
  run_boxed(op, stack);
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes())
    resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset.expect_int());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty())
    tensor->set_sizes_contiguous(sizes);
  else
    tensor->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t count = source.nbytes() / self.itemsize();
  const std::vector<c10::SymInt> size{count};
  return set_storage(self, std::move(source), 0, size, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_empty(Tensor& self) {
  const std::vector<c10::SymInt> size{0};
  const Tensor none = at::empty({0}, self.options());
  return set_storage(self, none.storage(), 0, size, {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

at::Scalar item(const Tensor& self) {
  current_stream(self.device().index()).wait();
  return host_tensor(self).item();
}

// Copies within a device, between devices, and between a device and the host.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Tensor source = host_tensor(from), target = host_tensor(to);
  const auto copy = [source, target] { target.copy_(source); };
  if (is_here(from) && is_here(to)) {
    Stream& stream = current_stream(from.device().index());
    Stream& other = current_stream(to.device().index());
    wait_for(stream, mark(other));
    stream.launch(copy);
    wait_for(other, mark(stream));
    return to;
  }
  const bool is_upload = is_here(to);
  const Tensor& host = is_upload ? from : to;
  Stream& stream = current_stream((is_upload ? to : from).device().index());
  // As with other accelerators: the host's side of a copy may be late only in pinned memory of one stretch.
  const bool is_direct = non_blocking && is_pinned(host.unsafeGetTensorImpl()->data()) &&
      from.scalar_type() == to.scalar_type();
  if (is_direct) {
    stream.launch(copy);
    use_pinned(host.unsafeGetTensorImpl()->data(), stream);
  } else if (is_upload) {
    const Tensor staged = source.clone();
    stream.launch([staged, target] { target.copy_(staged); });
    if (!non_blocking)
      stream.wait();
  } else {
    stream.launch(copy);
    stream.wait();
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.numel() == 0)
    to.resize_(from.sizes());
  return copy_from(from, to, false);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", item);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve_backward>());
}

} // namespace

Tensor host_tensor(const Tensor& tensor) {
  if (!is_here(tensor))
    return tensor;
  const auto options = tensor.options().device(c10::kCPU);
  const void* address = tensor.unsafeGetTensorImpl()->data();
  Tensor view = tensor.numel() == 0 || !address
      ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
      : at::from_blob(host_view(address), tensor.sizes(), tensor.strides(), options);
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  copy_wrapped_number(tensor, view);
  return view;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const int device = impl->device().index();
  c10::DeviceGuard guard(impl->device());
  auto memory = device_allocator().allocate(bytes);
  const size_t kept = std::min(bytes, impl->nbytes());
  if (kept && impl->data()) {
    char *to = static_cast<char*>(host_view(memory.get())), *from = static_cast<char*>(host_view(impl->data()));
    current_stream(device).launch([to, from, kept] { std::copy(from, from + kept, to); });
  }
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

} // namespace sim
