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

struct Message {
  int peer;
  bool sends;
  char* at;
  size_t bytes;
};

// Meets all other ranks of a communicator; null: one does not come.
Communicator* meet(const std::string& id, int rank, int size);

// Sends and receives messages, of this rank to itself too, until all have left and arrived.
//   op: what they are of; it must be the same on the other side, as must be their bytes. Where it is not, that is
//   reported and the process ends.
// Returns false where the communicator was aborted.
bool exchange(Communicator* communicator, uint64_t op, const char* name, std::vector<Message>& messages);

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
