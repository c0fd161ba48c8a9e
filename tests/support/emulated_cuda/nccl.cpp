// A stand-in for libnccl.so.2: a collective is something that its stream does, in one go with the other ranks, as a
// kernel of NCCL's is. Of the arguments that it does not take (registered memory, windows, scaled sums) none is passed.
#include "nccl.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <random>

namespace emulated {

const char* const NAMES[] = {
    "", "AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "Send/Recv", "Send/Recv", "AlltoAll"};
static const size_t WIDTHS[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
enum Reduction { SUM, PRODUCT, MAXIMUM, MINIMUM, MEAN };

size_t Call::bytes() const { return count * WIDTHS[type]; }

static float widened(uint16_t value, int type) {
  if (type == FLOAT16) {
    _Float16 half;
    memcpy(&half, &value, sizeof half);
    return (float)half;
  }
  uint32_t bits = (uint32_t)value << 16;
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}

static uint16_t narrowed(float value, int type) {
  uint16_t found;
  if (type == FLOAT16) {
    _Float16 half = (_Float16)value;
    memcpy(&found, &half, sizeof found);
    return found;
  }
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <class T>
static T reduced(T a, T b, int reduction) {
  switch (reduction) {
    case PRODUCT: return a * b;
    case MAXIMUM: return std::max(a, b);
    case MINIMUM: return std::min(a, b);
    default: return a + b;
  }
}

// Reduces the values of all ranks into the first one's.
template <class T>
static void reduce_as(std::vector<std::vector<char>>& of_ranks, size_t count, int reduction) {
  T* found = (T*)of_ranks[0].data();
  for (size_t k = 0; k < count; k++) {
    for (size_t rank = 1; rank < of_ranks.size(); rank++)
      found[k] = reduced(found[k], ((T*)of_ranks[rank].data())[k], reduction);
    if (reduction == MEAN) found[k] = found[k] / (T)of_ranks.size();
  }
}

static void reduce_halves(std::vector<std::vector<char>>& of_ranks, size_t count, int type, int reduction) {
  auto* found = (uint16_t*)of_ranks[0].data();
  for (size_t k = 0; k < count; k++) {
    float value = widened(found[k], type);
    for (size_t rank = 1; rank < of_ranks.size(); rank++)
      value = reduced(value, widened(((uint16_t*)of_ranks[rank].data())[k], type), reduction);
    found[k] = narrowed(reduction == MEAN ? value / of_ranks.size() : value, type);
  }
}

static void reduce(std::vector<std::vector<char>>& of_ranks, const Call& call) {
  size_t count = call.count;
  switch (call.type) {
    case INT8: return reduce_as<int8_t>(of_ranks, count, call.reduction);
    case UINT8: return reduce_as<uint8_t>(of_ranks, count, call.reduction);
    case INT32: return reduce_as<int32_t>(of_ranks, count, call.reduction);
    case UINT32: return reduce_as<uint32_t>(of_ranks, count, call.reduction);
    case INT64: return reduce_as<int64_t>(of_ranks, count, call.reduction);
    case UINT64: return reduce_as<uint64_t>(of_ranks, count, call.reduction);
    case FLOAT32: return reduce_as<float>(of_ranks, count, call.reduction);
    case FLOAT64: return reduce_as<double>(of_ranks, count, call.reduction);
    default: return reduce_halves(of_ranks, count, call.type, call.reduction);
  }
}

// AllReduce, Reduce, ReduceScatter: the parts of all ranks, then their reduction, in rank order.
static void run_reduction(const Call& call, const char* sent) {
  auto* communicator = call.communicator;
  int own = communicator->rank;
  size_t bytes = call.bytes();
  bool receives = call.kind != REDUCE || call.peer == own;
  std::vector<std::vector<char>> of_ranks(communicator->size, std::vector<char>(receives ? bytes : 0));
  std::vector<Message> messages;
  for (int rank = 0; rank < communicator->size; rank++) {
    const char* part = call.kind == REDUCE_SCATTER ? sent + bytes * rank : sent;
    if (rank == own && receives) memcpy(of_ranks[rank].data(), part, bytes);
    if (rank == own) continue;
    if (call.kind != REDUCE || rank == call.peer) messages.push_back({rank, true, (char*)part, bytes});
    if (receives) messages.push_back({rank, false, of_ranks[rank].data(), bytes});
  }
  if (!exchange(communicator, call.op(), NAMES[call.kind], messages) || !receives) return;
  reduce(of_ranks, call);
  memcpy(call.received, of_ranks[0].data(), bytes);
}

static void run_one(const Call& call) {
  if (hollow(call)) return run_hollow(call);
  auto* communicator = call.communicator;
  int own = communicator->rank, size = communicator->size;
  size_t bytes = call.bytes();
  // Where a collective works in place, what it sends is kept apart from what it receives.
  const char* in_place = call.kind == ALL_GATHER ? call.received + bytes * own : call.received;
  bool apart = call.sent == in_place || (call.kind == REDUCE_SCATTER && call.received == call.sent + bytes * own);
  size_t sends = bytes * (call.kind == REDUCE_SCATTER || call.kind == ALL_TO_ALL ? size : 1);
  std::vector<char> copy;
  if (apart) copy.assign(call.sent, call.sent + sends);
  const char* sent = apart ? copy.data() : call.sent;
  std::vector<Message> messages;
  switch (call.kind) {
    case BROADCAST:
      if (own != call.peer) messages.push_back({call.peer, false, call.received, bytes});
      for (int rank = 0; rank < size && own == call.peer; rank++)
        if (rank != own) messages.push_back({rank, true, (char*)sent, bytes});
      if (own == call.peer && call.received != call.sent) memcpy(call.received, sent, bytes);
      break;
    case ALL_GATHER:
    case ALL_TO_ALL:
      for (int rank = 0; rank < size; rank++) {
        messages.push_back({rank, true, (char*)sent + (call.kind == ALL_TO_ALL ? bytes * rank : 0), bytes});
        messages.push_back({rank, false, call.received + bytes * rank, bytes});
      }
      break;
    default: return run_reduction(call, sent);
  }
  exchange(communicator, call.op(), NAMES[call.kind], messages);
}

static std::string text_of(const Call& call) {
  return std::string(NAMES[call.kind]) + " on communicator " + std::to_string(call.communicator->number) + ", rank " +
         std::to_string(call.communicator->rank);
}

// What was called between one ncclGroupStart and its end, on one stream: one kernel.
static void run(const std::vector<Call>& calls, const LinkUse& use) {
  static const double delay_us = option("NCCL_DELAY_US", 0);
  static thread_local std::mt19937 random((unsigned)option("SEED", 0) * 7919 + getpid());
  if (delay_us >= 1) usleep(random() % (unsigned)delay_us);
  Turn turn(text_of(calls[0]));
  use.begin();
  for (size_t k = 0; k < calls.size();) {
    if (calls[k].kind != SEND && calls[k].kind != RECV) {
      run_one(calls[k++]);
      continue;
    }
    std::map<Communicator*, std::vector<Message>> messages;
    for (; k < calls.size() && (calls[k].kind == SEND || calls[k].kind == RECV); k++) {
      auto& call = calls[k];
      char* at = call.kind == SEND ? (char*)call.sent : call.received;
      messages[call.communicator].push_back({call.peer, call.kind == SEND, at, call.bytes(), hollow(call)});
    }
    for (auto& [communicator, of_one] : messages) exchange(communicator, (uint64_t)SEND << 32, NAMES[SEND], of_one);
  }
  use.end();
}

static thread_local int depth = 0;
static thread_local std::vector<Call> called;
static std::atomic<long> communicators{0}, kernels{0};

static void note_accesses(const Call& call, std::vector<Access>& accesses) {
  size_t bytes = call.bytes(), size = call.communicator->size;
  bool sends_all = call.kind == REDUCE_SCATTER || call.kind == ALL_TO_ALL;
  bool receives_all = call.kind == ALL_GATHER || call.kind == ALL_TO_ALL;
  if (call.kind != RECV && call.sent != call.received) accesses.push_back({call.sent, bytes * (sends_all ? size : 1), false});
  bool receives = call.kind != SEND && (call.kind != REDUCE || call.peer == call.communicator->rank);
  if (receives) accesses.push_back({call.received, bytes * (receives_all ? size : 1), true});
}

static int enqueue_calls() {
  std::map<cudaStream_t, std::vector<Call>> by_stream;
  for (auto& each : called) by_stream[each.stream].push_back(each);
  called.clear();
  for (auto& [stream, calls] : by_stream) {
    std::vector<Access> accesses;
    for (auto& each : calls) note_accesses(each, accesses);
    // A device is taken for memory that every collective writes: two that nothing orders are reported. Ranks could
    // begin them in different orders, and wait for each other where there is room for one kernel alone.
    static char devices[64];
    if (option("ORDERED", 1) != 0) accesses.push_back({&devices[calls[0].communicator->device], 1, true});
    kernels++;
    LinkUse use(calls);
    enqueue(stream, [calls = calls, use] { run(calls, use); }, accesses, forever(text_of(calls[0])), use.ns());
  }
  return DONE;
}

static int call(const Call& call) {
  called.push_back(call);
  return depth > 0 ? DONE : enqueue_calls();
}

static Communicator* counted(Communicator* communicator) {
  if (communicator != nullptr) communicators++;
  return communicator;
}

}  // namespace emulated

using namespace emulated;

struct Id {
  char text[128];
};

EXPORTED void emulated_nccl_counts(long* counts) {
  counts[0] = communicators;
  counts[1] = kernels;
}

EXPORTED int ncclGroupStart() {
  depth++;
  return DONE;
}
EXPORTED int ncclGroupEnd() { return --depth > 0 ? DONE : enqueue_calls(); }
EXPORTED int ncclGetVersion(int* version) {
  *version = 22907;
  return DONE;
}
EXPORTED int ncclGetUniqueId(Id* id) {
  static std::atomic<int> next{0};
  memset(id, 0, sizeof *id);
  auto now = (long)std::chrono::steady_clock::now().time_since_epoch().count();
  snprintf(id->text, 60, "%d-%d-%lx", (int)getpid(), next++, now);
  return DONE;
}
EXPORTED int ncclCommInitRank(Communicator** made, int size, Id id, int rank) {
  *made = counted(meet(id.text, rank, size));
  return *made != nullptr ? DONE : SYSTEM_ERROR;
}
EXPORTED int ncclCommInitRankConfig(Communicator** made, int size, Id id, int rank, void*) {
  return ncclCommInitRank(made, size, id, rank);
}
EXPORTED int ncclCommInitRankScalable(Communicator** made, int size, int rank, int, Id* id, void*) {
  return ncclCommInitRank(made, size, *id, rank);
}
EXPORTED int ncclCommSplit(Communicator* whole, int color, int key, Communicator** made, void*) {
  std::vector<std::pair<int, int>> all(whole->size);
  std::pair<int, int> own{color, key};
  std::vector<Message> messages;
  for (int rank = 0; rank < whole->size; rank++) {
    messages.push_back({rank, true, (char*)&own, sizeof own});
    messages.push_back({rank, false, (char*)&all[rank], sizeof own});
  }
  if (!exchange(whole, 99ull << 32, "a split", messages)) return REMOTE_ERROR;
  int split = whole->splits++, rank = 0, size = 0;
  *made = nullptr;
  if (color < 0) return DONE;
  for (int other = 0; other < whole->size; other++) {
    if (all[other].first != color) continue;
    size++;
    rank += std::pair(all[other].second, other) < std::pair(key, whole->rank);
  }
  *made = counted(meet(whole->id + "." + std::to_string(split) + "." + std::to_string(color), rank, size));
  return *made != nullptr ? DONE : SYSTEM_ERROR;
}
EXPORTED int ncclCommGetAsyncError(Communicator* communicator, int* error) {
  *error = communicator->error;
  return DONE;
}
EXPORTED int ncclCommAbort(Communicator* communicator) {
  communicator->aborted = true;
  for (int each : communicator->sockets)
    if (each >= 0) shutdown(each, SHUT_RDWR);
  return DONE;
}
EXPORTED int ncclCommFinalize(Communicator*) { return DONE; }
EXPORTED int ncclCommDestroy(Communicator* communicator) {
  cudaDeviceSynchronize();
  for (int each : communicator->sockets)
    if (each >= 0) close(each);
  return DONE;
}
EXPORTED int ncclCommCount(Communicator* communicator, int* size) {
  *size = communicator->size;
  return DONE;
}
EXPORTED int ncclCommUserRank(Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return DONE;
}
EXPORTED int ncclCommCuDevice(Communicator* communicator, int* device) {
  *device = communicator->device;
  return DONE;
}
EXPORTED const char* ncclGetErrorString(int error) { return forever("error " + std::to_string(error) + " of the emulated NCCL"); }
EXPORTED const char* ncclGetLastError(Communicator*) { return ""; }

EXPORTED int ncclAllReduce(const char* sent, char* received, size_t count, int type, int reduction, Communicator* among,
                           cudaStream_t stream) {
  return call({among, stream, ALL_REDUCE, sent, received, count, type, reduction, 0});
}
EXPORTED int ncclBroadcast(const char* sent, char* received, size_t count, int type, int root, Communicator* among,
                           cudaStream_t stream) {
  return call({among, stream, BROADCAST, sent, received, count, type, 0, root});
}
EXPORTED int ncclBcast(char* buffer, size_t count, int type, int root, Communicator* among, cudaStream_t stream) {
  return call({among, stream, BROADCAST, buffer, buffer, count, type, 0, root});
}
EXPORTED int ncclReduce(const char* sent, char* received, size_t count, int type, int reduction, int root,
                        Communicator* among, cudaStream_t stream) {
  return call({among, stream, REDUCE, sent, received, count, type, reduction, root});
}
EXPORTED int ncclAllGather(const char* sent, char* received, size_t count, int type, Communicator* among,
                           cudaStream_t stream) {
  return call({among, stream, ALL_GATHER, sent, received, count, type, 0, 0});
}
EXPORTED int ncclReduceScatter(const char* sent, char* received, size_t count, int type, int reduction,
                               Communicator* among, cudaStream_t stream) {
  return call({among, stream, REDUCE_SCATTER, sent, received, count, type, reduction, 0});
}
EXPORTED int ncclSend(const char* sent, size_t count, int type, int peer, Communicator* among, cudaStream_t stream) {
  return call({among, stream, SEND, sent, nullptr, count, type, 0, peer});
}
EXPORTED int ncclRecv(char* received, size_t count, int type, int peer, Communicator* among, cudaStream_t stream) {
  return call({among, stream, RECV, nullptr, received, count, type, 0, peer});
}
EXPORTED int ncclAlltoAll(const char* sent, char* received, size_t count, int type, Communicator* among,
                          cudaStream_t stream) {
  return call({among, stream, ALL_TO_ALL, sent, received, count, type, 0, 0});
}
