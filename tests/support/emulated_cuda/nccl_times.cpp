// The time that collectives take, by bytes over a rank's one link (`times.h`).
#include "nccl.h"

#include <algorithm>

namespace emulated {

static std::atomic<long> sent_bytes{0}, busy_ns{0};
static std::atomic<int64_t> link_free_at{0};

bool hollow(const Call& call) { return timed() && call.type >= FLOAT16 && call.bytes() > FEW_BYTES; }

void run_hollow(const Call& call) {
  int own = call.communicator->rank, root = call.peer;
  std::vector<Message> messages;
  for (int rank = 0; rank < call.communicator->size; rank++) {
    if (rank == own) continue;
    bool sends = call.kind == BROADCAST ? own == root : call.kind == REDUCE ? rank == root : true;
    bool receives = call.kind == BROADCAST ? rank == root : call.kind == REDUCE ? own == root : true;
    if (sends) messages.push_back({rank, true, nullptr, call.bytes(), true});
    if (receives) messages.push_back({rank, false, nullptr, call.bytes(), true});
  }
  exchange(call.communicator, call.op(), NAMES[call.kind], messages);
}

// Bytes and messages as embrace_fx/cost/links.py counts them: of reductions and gatherings those of a ring, of single
// messages those of the busier direction.
LinkUse::LinkUse(const std::vector<Call>& calls) {
  struct Sent {
    double bytes = 0, messages = 0;
  } rings, sends, receives;
  for (auto& call : calls) {
    double others = call.communicator->size - 1, bytes = (double)call.bytes();
    bool single = call.kind == SEND || call.kind == RECV;
    if (others == 0 || (single && call.peer == call.communicator->rank)) continue;
    auto& sent = call.kind == SEND ? sends : call.kind == RECV ? receives : rings;
    if (call.kind == ALL_REDUCE) sent.bytes += 2 * others / (others + 1) * bytes;
    else if (single || call.kind == BROADCAST || call.kind == REDUCE) sent.bytes += bytes;
    else sent.bytes += others * bytes;
    sent.messages += single ? 1 : call.kind == ALL_REDUCE ? 2 * others : others;
  }
  double bytes = rings.bytes + std::max(sends.bytes, receives.bytes);
  ns_ = link_ns(bytes, rings.messages + std::max(sends.messages, receives.messages));
  sent_bytes += (long)(rings.bytes + sends.bytes);
  busy_ns += (long)ns_;
}

void LinkUse::begin() const { stream_not_before(link_free_at); }

void LinkUse::end() const { link_free_at = stream_now() + (int64_t)ns_; }

}  // namespace emulated

// Bytes that this rank has been given to send, and nanoseconds that they take.
EXPORTED void emulated_nccl_times(long* found) {
  found[0] = emulated::sent_bytes;
  found[1] = emulated::busy_ns;
}
