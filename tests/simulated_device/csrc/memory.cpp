#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/util/Exception.h>

namespace sim {
namespace {

constexpr size_t kArena = size_t(1) << 36; // addresses of a device; pages that are not written take no memory
constexpr size_t kRound = 512;
constexpr size_t kPage = 4096;

using Kind = c10::CachingAllocator::StatType;

void add(c10::CachingAllocator::StatArray& stats, int64_t amount) {
  auto& stat = stats[static_cast<size_t>(Kind::AGGREGATE)];
  if (amount >= 0)
    stat.increase(amount);
  else
    stat.decrease(-amount);
}

// The two mappings of a device's memory.
struct Arena {
  char* addresses; // of tensors: an access ends the process
  char* pages; // of kernels
  Arena() {
    const int file = memfd_create("simulated-device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no memory for a simulated device");
    addresses = map(PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    pages = map(PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file);
    close(file);
  }
  static char* map(int protection, int flags, int file) {
    void* start = mmap(nullptr, kArena, protection, flags, file, 0);
    TORCH_CHECK(start != MAP_FAILED, "no addresses for a simulated device");
    return static_cast<char*>(start);
  }
  bool holds(const void* address) const {
    return address >= addresses && address < addresses + kArena;
  }
};

struct Block {
  size_t start, size, requested;
  int device;
  Stream* owner; // the stream that was current when it was allocated
  std::set<Stream*> users;
  std::vector<Mark> awaited; // of streams that use it after it was freed
};

// Freed blocks are used again by their own stream at once, and by others when they were given back.
class Memory final : public c10::DeviceAllocator {
 public:
  Memory() : devices_(device_count()) {}

  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device type(kDevice, device);
    if (bytes == 0)
      return {nullptr, nullptr, &free, type};
    Stream& owner = current_stream(device);
    Block* block = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      block = take(device, owner, bytes);
    }
    if (!block) { // as caching allocators do: what waits for streams or is cached is given back first
      give_back(device);
      std::lock_guard<std::mutex> lock(mutex_);
      block = take(device, owner, bytes);
      if (!block)
        refuse(device, bytes);
    }
    void* address = arena(device).addresses + block->start;
    return {address, block, &free, type};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    synchronize_device(current_device());
    std::memcpy(host_view(to), host_view(from), bytes);
  }

  bool initialized() override { return is_started(); }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < device_count(); ++device)
      give_back(device);
  }

  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    auto* block = static_cast<Block*>(memory.get_context());
    if (!block || memory.get_deleter() != &free)
      return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (&stream_of(stream) != block->owner)
      block->users.insert(&stream_of(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    require_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    return devices_[device].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override { reset(device, false); }
  void resetPeakStats(c10::DeviceIndex device) override { reset(device, true); }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    require_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    Device& of = devices_[device];
    return {of.limit - reserved(of), of.limit};
  }

  void set_limit(int device, size_t bytes) {
    require_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    devices_[device].limit = bytes;
  }

  void* view(const void* address) {
    for (int device = 0; device < device_count(); ++device)
      if (devices_[device].arena && devices_[device].arena->holds(address))
        return devices_[device].arena->pages +
            (static_cast<const char*>(address) - devices_[device].arena->addresses);
    return const_cast<void*>(address);
  }

 private:
  struct Device {
    std::unique_ptr<Arena> arena;
    size_t limit = size_t(2) << 30;
    size_t used = 0; // of the arena, from its start
    std::multimap<size_t, size_t> gaps; // in it: size -> start
    std::map<Stream*, std::multimap<size_t, Block*>> cached; // by size
    std::vector<Block*> waiting; // freed, while other streams use them
    c10::CachingDeviceAllocator::DeviceStats stats;
  };

  Arena& arena(int device) {
    if (!devices_[device].arena)
      devices_[device].arena = std::make_unique<Arena>();
    return *devices_[device].arena;
  }

  static int64_t reserved(const Device& of) {
    return of.stats.reserved_bytes[static_cast<size_t>(Kind::AGGREGATE)].current;
  }

  static void free(void* context) { instance().release(static_cast<Block*>(context)); }
  static Memory& instance() { return static_cast<Memory&>(device_allocator()); }

  Block* take(int device, Stream& owner, size_t bytes) {
    const size_t size = (bytes + kRound - 1) / kRound * kRound;
    Device& of = devices_[device];
    arena(device);
    collect(of);
    Block* block = nullptr;
    auto& cached = of.cached[&owner];
    auto found = cached.lower_bound(size);
    if (found != cached.end() && found->first <= 2 * size) {
      found = std::prev(cached.upper_bound(found->first)); // the one that was freed last: its users may still run
      block = found->second;
      cached.erase(found);
    } else if (reserved(of) + size <= of.limit) {
      block = new Block{find_gap(of, size), size, 0, device, &owner, {}, {}};
      add(of.stats.reserved_bytes, size);
      add(of.stats.segment, 1);
      ++of.stats.num_device_alloc;
    } else {
      return nullptr;
    }
    block->requested = bytes;
    add(of.stats.allocation, 1);
    add(of.stats.active, 1);
    add(of.stats.allocated_bytes, block->size);
    add(of.stats.active_bytes, block->size);
    add(of.stats.requested_bytes, bytes);
    return block;
  }

  static size_t find_gap(Device& of, size_t size) {
    if (auto found = of.gaps.lower_bound(size); found != of.gaps.end()) {
      const auto [room, start] = *found;
      of.gaps.erase(found);
      if (room > size)
        of.gaps.emplace(room - size, start + size);
      return start;
    }
    const size_t start = of.used;
    TORCH_CHECK(start + size <= kArena, "the addresses of a simulated device are used up");
    of.used += size;
    return start;
  }

  void release(Block* block) {
    if (!is_started())
      return; // in a fork
    std::lock_guard<std::mutex> lock(mutex_);
    Device& of = devices_[block->device];
    add(of.stats.allocation, -1);
    add(of.stats.allocated_bytes, -static_cast<int64_t>(block->size));
    add(of.stats.requested_bytes, -static_cast<int64_t>(block->requested));
    for (Stream* user : block->users)
      block->awaited.push_back(mark(*user));
    block->users.clear();
    of.waiting.push_back(block);
    collect(of);
  }

  // Moves freed blocks that no other stream uses any more to the cache of their stream.
  void collect(Device& of) {
    auto is_unused = [&](Block* block) {
      for (const Mark& mark : block->awaited)
        if (!mark.is_done())
          return false;
      block->awaited.clear();
      add(of.stats.active, -1);
      add(of.stats.active_bytes, -static_cast<int64_t>(block->size));
      of.cached[block->owner].emplace(block->size, block);
      return true;
    };
    of.waiting.erase(std::remove_if(of.waiting.begin(), of.waiting.end(), is_unused), of.waiting.end());
  }

  void give_back(int device) {
    if (!devices_[device].arena)
      return;
    // Nobody frees memory until it is given back: its stream might still use it. Tasks of streams free none.
    std::lock_guard<std::mutex> lock(mutex_);
    synchronize_device(device);
    Device& of = devices_[device];
    collect(of);
    for (auto& [owner, blocks] : of.cached) {
      for (auto& [size, block] : blocks) {
        const size_t first = (block->start + kPage - 1) / kPage * kPage, last = (block->start + size) / kPage * kPage;
        if (last > first) // whole pages: others have neighbours in them
          madvise(of.arena->pages + first, last - first, MADV_REMOVE);
        of.gaps.emplace(size, block->start);
        add(of.stats.reserved_bytes, -static_cast<int64_t>(size));
        add(of.stats.segment, -1);
        ++of.stats.num_device_free;
        delete block;
      }
      blocks.clear();
    }
    merge_gaps(of);
  }

  static void merge_gaps(Device& of) {
    std::map<size_t, size_t> by_start;
    for (auto& [size, start] : of.gaps)
      by_start.emplace(start, size);
    of.gaps.clear();
    for (auto gap = by_start.begin(); gap != by_start.end();) {
      auto [start, size] = *gap++;
      while (gap != by_start.end() && gap->first == start + size)
        size += (gap++)->second;
      if (start + size == of.used)
        of.used = start;
      else
        of.gaps.emplace(size, start);
    }
  }

  void refuse(int device, size_t bytes) {
    Device& of = devices_[device];
    ++of.stats.num_ooms;
    const auto free = of.limit - std::min<size_t>(of.limit, reserved(of));
    TORCH_CHECK_WITH(OutOfMemoryError, false, "SIM out of memory. Tried to allocate ", bytes, " bytes. Device ",
                     device, " has a total capacity of ", of.limit, " bytes of which ", free, " bytes are free.");
  }

  void reset(int device, bool peak) {
    require_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = devices_[device].stats;
    for (auto* all : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
                      &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      for (auto& stat : *all)
        peak ? stat.reset_peak() : stat.reset_accumulated();
    if (!peak)
      stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }

  std::mutex mutex_;
  std::vector<Device> devices_;
};

// Page-locked memory of the host: a freed block is used again when the copies that use it are done.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t size = std::max<size_t>(64, (bytes + 63) / 64 * 64);
    for (auto& [start, block] : blocks_) {
      const bool fits = block.is_free && block.size == size;
      if (fits && std::all_of(block.uses.begin(), block.uses.end(), [](Mark& use) { return use.is_done(); })) {
        block.is_free = false;
        block.uses.clear();
        return {start, start, &free, c10::Device(c10::DeviceType::CPU)};
      }
    }
    char* start = static_cast<char*>(std::aligned_alloc(64, size));
    TORCH_CHECK(start, "no memory for ", bytes, " pinned bytes");
    blocks_[start] = {size, false, {}};
    return {start, start, &free, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(address) != nullptr;
  }

  void use(const void* address, Stream& stream) {
    const Mark now = mark(stream);
    std::lock_guard<std::mutex> lock(mutex_);
    if (Block* block = find(address))
      block->uses.push_back(now);
  }

 private:
  struct Block {
    size_t size;
    bool is_free;
    std::vector<Mark> uses;
  };

  Block* find(const void* address) {
    auto after = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == blocks_.begin())
      return nullptr;
    auto& [start, block] = *std::prev(after);
    return address < start + block.size && !block.is_free ? &block : nullptr;
  }

  static void free(void* start) {
    auto& all = static_cast<PinnedMemory&>(pinned_allocator());
    std::lock_guard<std::mutex> lock(all.mutex_);
    all.blocks_.at(static_cast<char*>(start)).is_free = true;
  }

  std::mutex mutex_;
  std::map<char*, Block> blocks_;
};

Memory& memory() {
  static Memory* all = new Memory();
  return *all;
}

PinnedMemory& pinned() {
  static PinnedMemory* all = new PinnedMemory();
  return *all;
}

} // namespace

void* host_view(const void* address) { return memory().view(address); }
c10::DeviceAllocator& device_allocator() { return memory(); }
void set_memory_limit(int device, size_t bytes) { memory().set_limit(device, bytes); }
c10::Allocator& pinned_allocator() { return pinned(); }
bool is_pinned(const void* address) { return pinned().holds(address); }
void use_pinned(const void* address, Stream& stream) { pinned().use(address, stream); }

} // namespace sim
