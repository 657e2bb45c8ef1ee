// Streams, events and memory of the simulated devices.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 9; // of a device: the default one, and a pool that is handed out in turn

enum class Late { none, all, default_streams };

// Settings of the tests, read by all threads.
struct Settings {
  // Of which streams work runs when something waits for it, and not before.
  std::atomic<Late> late{Late::none};
  std::atomic<int64_t> delay{0}; // microseconds before each kernel and each copy
  std::atomic<int64_t> launches{0}; // kernels and copies so far
};
Settings& settings();

int device_count();
void require_device(int device);
bool is_started();
bool is_in_bad_fork();
void shut_down();

// A queue and a thread. Tasks run in their order, each when it is wanted.
class Stream {
 public:
  Stream(int device, int id);
  int device() const { return device_; }
  c10::Stream handle() const;

  // Appends a task and returns its number, counted from 1. `is_work`: it is delayed, and may be late.
  uint64_t launch(std::function<void()> task, bool is_work = true);
  uint64_t launched();
  bool is_done(uint64_t number);
  void want(uint64_t number); // lets tasks up to this one run
  void wait(uint64_t number); // blocks the calling thread
  void wait() { wait(launched()); }
  void make_prompt(); // its tasks are never late: for collectives, which other processes wait for
  void stop();

 private:
  void run();
  struct Task {
    std::function<void()> run;
    bool is_work;
  };
  const int device_;
  const int id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t launched_ = 0, done_ = 0, wanted_ = 0;
  bool is_prompt_ = false, is_stopped_ = false;
  std::thread thread_;
};

Stream& stream_of(const c10::Stream& handle);
Stream& current_stream(int device);
c10::Stream exchange_stream(const c10::Stream& handle);
c10::Stream stream_from_pool(int device);
int current_device();
int exchange_device(int device);
void synchronize_device(int device);
void want_everything();
// An error of a task is raised by the next call that waits.
void raise_error_of(int device);

// A point in a stream.
struct Mark {
  Stream* stream;
  uint64_t number;
  std::shared_ptr<std::atomic<int64_t>> time; // nanoseconds when it was reached
  bool is_done() const { return stream->is_done(number); }
};
Mark mark(Stream& stream);
void wait_for(Stream& stream, const Mark& mark); // the stream waits, not the caller

// Memory: tensors have addresses that nobody may read or write. Kernels use another mapping of the same pages.
void* host_view(const void* address); // where kernels find the memory of a device; other addresses as they are
c10::DeviceAllocator& device_allocator();
void set_memory_limit(int device, size_t bytes);

c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);
void use_pinned(const void* address, Stream& stream); // keeps the block until the stream has got here

} // namespace sim
