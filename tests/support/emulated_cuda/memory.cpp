// Memory and copies. A device's memory is the host's, full of 0xFF (nan, -1) when it is made. A timed run leaves it as the
// kernel gives it, zeros that take no room until they are written: models are larger there than the machine's memory.
#include "runtime.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace emulated {

static std::mutex lock;

static std::map<uintptr_t, Range>& ranges() {
  static auto* found = new std::map<uintptr_t, Range>;
  return *found;
}

static std::vector<size_t>& used() {
  static auto* bytes = new std::vector<size_t>(device_count());
  return *bytes;
}

size_t device_bytes() { return (size_t)(option("MEMORY_MB", 4096) * (1 << 20)); }

Range range_of(const void* at) {
  std::lock_guard<std::mutex> held(lock);
  auto next = ranges().upper_bound((uintptr_t)at);
  if (next == ranges().begin()) return {0, Kind::unknown, -1};
  auto& [begin, range] = *std::prev(next);
  return (uintptr_t)at < begin + range.bytes ? range : Range{0, Kind::unknown, -1};
}

static void note(void* at, Range range) {
  std::lock_guard<std::mutex> held(lock);
  ranges()[(uintptr_t)at] = range;
}

static bool forget(void* at) {
  std::lock_guard<std::mutex> held_too(enqueuing);
  std::lock_guard<std::mutex> held(lock);
  auto found = ranges().find((uintptr_t)at);
  if (found == ranges().end()) return false;
  hazards.forget(at, found->second.bytes);
  if (found->second.kind == Kind::device) used()[found->second.device] -= found->second.bytes;
  ranges().erase(found);
  return true;
}

static uint64_t sum_of(const void* at, size_t bytes) {
  uint64_t sum = 1469598103934665603ull;
  for (size_t k = 0; k < bytes; k++) sum = (sum ^ ((const unsigned char*)at)[k]) * 1099511628211ull;
  return sum;
}

static cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  auto target = range_of(to).kind, source = range_of(from).kind;
  bool on_device = target == Kind::device && source == Kind::device;
  double ns = on_device ? kernel_ns(2.0 * bytes, 0, 1) : host_copy_ns(bytes);
  if (source == Kind::unknown) {  // pageable memory is staged before the call returns
    auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    enqueue(stream, [=] { memcpy(to, staged->data(), bytes); }, {{to, bytes, true}}, "a copy from pageable memory", ns);
    return cudaSuccess;
  }
  if (source == Kind::host) {  // pinned: the host must leave it alone until the copy has ended
    bool ours = false;  // a copy that is still to come may write it, in its turn
    if (!timed()) {
      std::lock_guard<std::mutex> held(enqueuing);
      ours = hazards.host_knows_the_end_of(from, bytes);
    }
    auto sum = ours ? sum_of(from, bytes) : 0;
    auto task = [=] {
      if (ours && sum_of(from, bytes) != sum)
        report("PINNED: memory of the host was written between the call that copies it to the device and the copy");
      memcpy(to, from, bytes);
    };
    enqueue(stream, task, {{from, bytes, false}, {to, bytes, true}}, "a copy from pinned memory", ns);
    return cudaSuccess;
  }
  if (target == Kind::host && !timed()) {  // who reads it before the copy has ended finds nothing that could be right
    std::lock_guard<std::mutex> held(enqueuing);
    if (hazards.host_knows_the_end_of(to, bytes)) memset(to, 0xFE, bytes);
  }
  const char* what = target == Kind::device ? "a copy on the device" : "a copy to the host";
  enqueue(stream, [=] { memmove(to, from, bytes); }, {{from, bytes, false}, {to, bytes, true}}, what, ns);
  if (target == Kind::unknown) {
    if (!watches_nccl()) host_waits.copies++;
    HostWait waits;
    stream_of(stream)->wait();
  }
  return cudaSuccess;
}

}  // namespace emulated

using namespace emulated;

EXPORTED cudaError_t cudaMalloc(void** made, size_t bytes) {
  *made = nullptr;
  use_device();
  if (bytes == 0) return cudaSuccess;
  int device = current_device();
  {
    std::lock_guard<std::mutex> held(lock);
    if (used()[device] + bytes > device_bytes()) return failed(cudaErrorMemoryAllocation);
    used()[device] += bytes;
  }
  if (posix_memalign(made, 2 << 20, bytes) != 0) return failed(cudaErrorMemoryAllocation);
  if (!timed()) memset(*made, 0xFF, bytes);
  note(*made, {bytes, Kind::device, device});
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFree(void* at) {
  if (at == nullptr) return cudaSuccess;
  cudaDeviceSynchronize();
  if (!forget(at)) return failed(cudaErrorInvalidValue);
  free(at);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> held(lock);
  *total = device_bytes();
  *free_bytes = *total - used()[current_device()];
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) {
  if (posix_memalign(made, 4096, bytes ? bytes : 1) != 0) return failed(cudaErrorMemoryAllocation);
  memset(*made, 0xFE, bytes);
  note(*made, {bytes, Kind::host, -1});
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFreeHost(void* at) {
  if (at == nullptr) return cudaSuccess;
  forget(at);
  free(at);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  note(at, {bytes, Kind::host, -1});
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostUnregister(void* at) {
  forget(at);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* at) {
  memset(found, 0, sizeof *found);
  auto range = range_of(at);
  found->device = range.kind == Kind::device ? range.device : range.kind == Kind::host ? current_device() : -2;
  found->type = range.kind == Kind::device ? cudaMemoryTypeDevice
                : range.kind == Kind::host ? cudaMemoryTypeHost
                                           : cudaMemoryTypeUnregistered;
  if (range.kind != Kind::unknown) found->devicePointer = (void*)at;
  if (range.kind == Kind::host) found->hostPointer = (void*)at;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  copy(to, from, bytes, nullptr);
  return cudaStreamSynchronize(nullptr);
}
EXPORTED cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  enqueue(stream, [=] { memset(at, value, bytes); }, {{at, bytes, true}}, "a memset", kernel_ns(bytes, 0, 1));
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  cudaMemsetAsync(at, value, bytes, nullptr);
  return cudaStreamSynchronize(nullptr);
}
