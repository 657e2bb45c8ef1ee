// What torch asks of a device: its guard, hooks, allocator and generators.
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "kernels.h"

namespace sim {
namespace {

struct Event {
  std::optional<Mark> last;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kDevice, static_cast<c10::DeviceIndex>(
                         device.has_index() ? exchange_device(device.index()) : current_device())};
  }
  c10::Device getDevice() const override {
    return {kDevice, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index())
      exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(number(device)).handle(); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, number(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_from_pool(number(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_from_pool(number(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    Stream& of = stream_of(stream);
    const uint64_t last = of.launched();
    of.want(last);
    return of.is_done(last);
  }
  void synchronizeStream(const c10::Stream& stream) const override { stream_of(stream).wait(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    device_allocator().recordStream(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event)
      *event = new Event();
    static_cast<Event*>(*event)->last = mark(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (const auto* of = static_cast<Event*>(event); of && of->last)
      wait_for(stream_of(stream), *of->last);
  }
  bool queryEvent(void* event) const override {
    const auto* of = static_cast<Event*>(event);
    if (!of || !of->last)
      return true;
    of->last->stream->want(of->last->number);
    return of->last->is_done();
  }
  void synchronizeEvent(void* event) const override {
    if (const auto* of = static_cast<Event*>(event); of && of->last)
      of->last->stream->wait(of->last->number);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    synchronizeEvent(second);
    return (*static_cast<Event*>(second)->last->time - *static_cast<Event*>(first)->last->time) / 1e6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

 private:
  static c10::DeviceIndex number(c10::Device device) {
    if (!device.has_index())
      return current_device();
    require_device(device.index());
    return device.index();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Its numbers are those of a generator of the CPU with the same seed.
struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::make_generator<at::CPUGeneratorImpl>()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->host = host.clone();
    return copy;
  }
  at::Generator host;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_started(); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchange_device(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

const bool registered = [] {
  c10::SetAllocator(kDevice, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* generators = new std::vector<at::Generator>();
    for (int index = 0; index < device_count(); ++index)
      generators->push_back(at::make_generator<GeneratorImpl>(index));
    return generators;
  }();
  require_device(device);
  return (*all)[device];
}

at::Generator host_generator(const c10::IValue& given, int device) {
  const auto generator = given.isNone() ? default_generator(device) : given.toGenerator();
  if (generator.device().type() != kDevice)
    return generator;
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->host;
}

DrawsFromDevice::DrawsFromDevice(int device) : device_(device) {
  if (device_ < 0)
    return;
  auto generator = at::detail::getDefaultCPUGenerator();
  before_ = generator.get_state();
  generator.set_state(default_generator(device_).get_state());
}

DrawsFromDevice::~DrawsFromDevice() {
  if (device_ < 0)
    return;
  auto generator = at::detail::getDefaultCPUGenerator();
  default_generator(device_).unsafeGetGeneratorImpl()->set_state(*generator.get_state().unsafeGetTensorImpl());
  generator.set_state(before_);
}

} // namespace sim
