// Which uses of memory nothing orders: what the streams' events promise, by vector clocks, and not what happened to occur.
//
// A stream does things in the order in which they were enqueued. What stands behind a wait follows what preceded the
// event's record. What is enqueued follows all that a thread of the host has seen the end of, by a query or a wait; the
// threads with which torch watches NCCL do not count, since nobody else knows what they have seen. All other threads
// count as one, so that what two of them tell each other needs no lock to be followed; a hazard between them is missed.
//
// A use is a range of bytes, from a tensor's first element to its last: two streams that write different columns of one
// tensor would be taken for a hazard.
#pragma once

#include "emulated.h"

#include <map>
#include <vector>

namespace emulated {

using Clock = std::vector<uint64_t>;  // by stream's number, how many things that it was given have certainly ended

void join(Clock& clock, const Clock& other);

// Everything below is called with the runtime's lock held.
class Hazards {
 public:
  // The next thing that a stream is given. Reports accesses that nothing orders.
  void enqueue(int stream, const std::vector<Access>& accesses, const char* what);
  // What has ended when an event that is recorded now passes.
  Clock record(int stream);
  void wait(int stream, const Clock& recorded);
  void host_saw(const Clock& passed);
  // Whether the host knows that every use of these bytes has ended.
  bool host_knows_the_end_of(const void* at, size_t bytes);
  // The memory is nobody's any more.
  void forget(const void* at, size_t bytes);

 private:
  struct Use {
    int stream;
    uint64_t at;
    const char* what;
  };
  struct Piece {
    uintptr_t end;
    Use write{-1, 0, nullptr};
    std::vector<Use> reads;  // since the write, one for each stream
  };
  using Pieces = std::map<uintptr_t, Piece>;

  Clock& clock_of(int stream);
  void split(uintptr_t at);
  // The pieces of a range, which are made where there are none.
  std::pair<Pieces::iterator, Pieces::iterator> pieces(uintptr_t begin, uintptr_t end);
  void check(const Use& earlier, const Clock& clock, const Use& use, const char* done, const char* to_what);

  Clock host_;
  std::vector<Clock> streams_;
  Pieces pieces_;
};

}  // namespace emulated
