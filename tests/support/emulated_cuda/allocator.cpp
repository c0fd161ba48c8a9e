// An allocator for torch.cuda.memory.CUDAPluggableAllocator that gives memory back at once: what frees a tensor while a
// stream of which the allocator was not told still uses it is found. torch's own gives memory back later, and not always
// to who would notice.
//
//   record_stream  the block's end waits for what the stream has been given until the block is freed
//   free           on the stream that the block came from: waits for the streams recorded, then writes 0xFF over it, then
//                  hands it out again, to that stream alone
#include "emulated.h"

#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

struct Block {
  size_t bytes;
  int device;
  cudaStream_t owner;
  std::set<cudaStream_t> users;
};

std::mutex lock;
auto& blocks = *new std::map<void*, Block>;
auto& unused = *new std::multimap<std::tuple<int, cudaStream_t, size_t>, void*>;

}  // namespace

EXPORTED void* emulated_allocate(size_t bytes, int device, cudaStream_t stream) {
  bytes = (bytes + 511) / 512 * 512;
  std::lock_guard<std::mutex> held(lock);
  void* at = nullptr;
  auto found = unused.find({device, stream, bytes});
  if (found != unused.end()) {
    at = found->second;
    unused.erase(found);
  } else if (cudaMalloc(&at, bytes) != cudaSuccess) {
    return nullptr;
  }
  blocks[at] = {bytes, device, stream, {}};
  return at;
}

EXPORTED void emulated_record_stream(void* at, cudaStream_t stream) {
  std::lock_guard<std::mutex> held(lock);
  auto found = blocks.find(at);
  if (found != blocks.end() && stream != found->second.owner) found->second.users.insert(stream);
}

EXPORTED void emulated_free(void* at, size_t, int, cudaStream_t) {
  std::lock_guard<std::mutex> held(lock);
  auto found = blocks.find(at);
  if (found == blocks.end()) return;
  auto block = found->second;
  blocks.erase(found);
  for (auto* each : block.users) {
    cudaEvent_t event;
    cudaEventCreate(&event);
    cudaEventRecord(event, each);
    cudaStreamWaitEvent(block.owner, event, 0);
    cudaEventDestroy(event);
  }
  size_t bytes = block.bytes;
  emulated::enqueue(block.owner, [=] { memset(at, 0xFF, bytes); }, {{at, bytes, true}}, "whoever has the memory next");
  unused.insert({{block.device, block.owner, bytes}, at});
}
