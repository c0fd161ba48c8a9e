// What libnccl.so.2 consists of: communicators, and messages between their ranks.
#pragma once

#include "emulated.h"

#include <atomic>

namespace emulated {

// The answers of NCCL's calls.
enum Answer { DONE = 0, SYSTEM_ERROR = 2, REMOTE_ERROR = 6 };

// A socket to every other rank. Each collective takes its turn on them, as a collective is one kernel on a device.
struct Communicator {
  int rank, size, device, number;  // number: of those that this process has made
  std::string id;
  std::vector<int> sockets;  // by rank; -1: itself
  std::atomic<int> error{0};
  std::atomic<bool> aborted{false};
  int splits = 0;
};

enum Kind { ALL_REDUCE = 1, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV, ALL_TO_ALL };
extern const char* const NAMES[];
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };

struct Call {
  Communicator* communicator;
  cudaStream_t stream;
  Kind kind;
  const char* sent;
  char* received;
  size_t count;  // elements, of one rank
  int type, reduction, peer;

  size_t bytes() const;
  uint64_t op() const { return (uint64_t)(kind == RECV ? SEND : kind) << 32 | type << 8 | reduction; }
};

struct Message {
  int peer;
  bool sends;
  char* at;
  size_t bytes;
  bool hollow = false;  // its values stay where they are: it says how many bytes it stands for, and when
};

// Meets all other ranks of a communicator; null: one does not come.
Communicator* meet(const std::string& id, int rank, int size);

// Sends and receives messages, of this rank to itself too, until all have left and arrived. Of a timed run the stream
// stands still until those of which it receives any have come.
//   op: what they are of; it must be the same on the other side, as must be their bytes. Where it is not, that is
//   reported and the process ends.
// Returns false where the communicator was aborted.
bool exchange(Communicator* communicator, uint64_t op, const char* name, std::vector<Message>& messages);

// Of a timed run, many floating-point numbers mean nothing, and are not sent: ranks exchange how many, and when.
bool hollow(const Call& call);
void run_hollow(const Call& call);

// What the calls of one kernel take of the rank's one link, on which all kernels follow one another.
class LinkUse {
 public:
  explicit LinkUse(const std::vector<Call>& calls);
  double ns() const { return ns_; }
  // On the stream's thread: waits for the link, and leaves it to the next one.
  void begin() const;
  void end() const;

 private:
  double ns_;
};

// One collective at a time on a device: others wait. EMULATED_CUDA_KERNELS sets another number.
class Turn {
 public:
  explicit Turn(const std::string& what);
  ~Turn();

 private:
  std::string what_;
};

// Who waits for a turn while another collective stands still, in words; empty: nobody.
std::string waiting_for_a_turn();

}  // namespace emulated
