#include "runtime.h"

#include <chrono>
#include <cstdlib>
#include <map>

#include <pthread.h>

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

namespace sim {
namespace {

std::atomic<bool> started{false}, forked{false};
std::mutex errors_mutex;
std::map<int, std::string> errors; // by the device
thread_local int device_now = 0;

struct Devices {
  std::vector<std::unique_ptr<Stream>> streams; // kStreams for each device
  std::vector<std::atomic<unsigned>> given;
  Devices() : given(device_count()) {
    for (int device = 0; device < device_count(); ++device)
      for (int id = 0; id < kStreams; ++id)
        streams.push_back(std::make_unique<Stream>(device, id));
    started = true;
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  }
};

Devices& devices() {
  TORCH_CHECK(!forked, "Cannot use the simulated device in a forked subprocess: its threads are not there. ",
              "Start processes with the 'spawn' method");
  static Devices* all = new Devices(); // never destroyed: threads use it until the process ends
  return *all;
}

std::vector<int64_t>& streams_now() {
  static thread_local std::vector<int64_t> ids(device_count(), 0);
  return ids;
}

} // namespace

Settings& settings() {
  static Settings* all = new Settings();
  return *all;
}

int device_count() {
  static const int count = [] {
    const char* text = std::getenv("SIMULATED_DEVICES");
    return text ? std::atoi(text) : 2;
  }();
  return count;
}

void require_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "invalid device ordinal ", device, ": there are ",
              device_count(), " simulated devices");
}

bool is_started() { return started && !forked; }
bool is_in_bad_fork() { return started && forked; }

Stream::Stream(int device, int id) : device_(device), id_(id), thread_([this] { run(); }) {}

c10::Stream Stream::handle() const {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device_), id_);
}

uint64_t Stream::launch(std::function<void()> task, bool is_work) {
  if (is_work)
    ++settings().launches;
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back({std::move(task), is_work});
  ++launched_;
  changed_.notify_all();
  return launched_;
}

uint64_t Stream::launched() {
  std::lock_guard<std::mutex> lock(mutex_);
  return launched_;
}

bool Stream::is_done(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= number;
}

void Stream::want(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (number > wanted_)
    wanted_ = number;
  changed_.notify_all();
}

void Stream::wait(uint64_t number) {
  TORCH_CHECK(!forked, "Cannot wait for the simulated device in a forked subprocess");
  want(number);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number || is_stopped_; });
  lock.unlock();
  raise_error_of(device_);
}

void Stream::make_prompt() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_prompt_ = true;
  changed_.notify_all();
}

void Stream::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopped_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable())
    thread_.join();
}

void Stream::run() {
  at::init_num_threads();
  device_now = device_;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] {
      const Late late = settings().late;
      const bool may_be_late = late == Late::all || (late == Late::default_streams && id_ == 0);
      const bool may_run = is_prompt_ || !may_be_late || done_ < wanted_;
      return is_stopped_ || (!tasks_.empty() && may_run);
    });
    if (is_stopped_)
      return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    if (const int64_t delay = settings().delay; task.is_work && delay > 0)
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    try {
      c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      task.run();
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> errors_lock(errors_mutex);
      errors.emplace(device_, error.what());
    }
    task.run = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

void raise_error_of(int device) {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(errors_mutex);
    auto found = errors.find(device);
    if (found == errors.end())
      return;
    text = found->second;
    errors.erase(found);
  }
  TORCH_CHECK(false, "a kernel failed on simulated device ", device, ": ", text);
}

Stream& stream_of(const c10::Stream& handle) {
  return *devices().streams.at(handle.device_index() * kStreams + handle.id());
}

Stream& current_stream(int device) {
  return *devices().streams.at(device * kStreams + streams_now().at(device));
}

c10::Stream exchange_stream(const c10::Stream& handle) {
  int64_t& now = streams_now().at(handle.device_index());
  c10::Stream before(c10::Stream::UNSAFE, handle.device(), now);
  now = handle.id();
  return before;
}

c10::Stream stream_from_pool(int device) {
  const int id = 1 + devices().given.at(device)++ % (kStreams - 1);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
}

int current_device() { return device_now; }

int exchange_device(int device) {
  require_device(device);
  const int before = device_now;
  device_now = device;
  return before;
}

void synchronize_device(int device) {
  for (int id = 0; id < kStreams; ++id)
    devices().streams.at(device * kStreams + id)->wait();
}

void want_everything() {
  if (is_started())
    for (auto& stream : devices().streams)
      stream->want(stream->launched());
}

void shut_down() {
  if (is_started())
    for (auto& stream : devices().streams)
      stream->stop();
}

Mark mark(Stream& stream) {
  auto time = std::make_shared<std::atomic<int64_t>>(0);
  const uint64_t number = stream.launch(
      [time] { *time = std::chrono::steady_clock::now().time_since_epoch().count(); }, false);
  return {&stream, number, std::move(time)};
}

void wait_for(Stream& stream, const Mark& mark) {
  if (mark.stream != &stream)
    stream.launch([mark] { mark.stream->wait(mark.number); }, false);
}

} // namespace sim
