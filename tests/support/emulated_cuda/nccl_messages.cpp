// Messages between ranks, over Unix sockets; what goes wrong with them is found here.
#include "nccl.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>

namespace emulated {

static std::mutex turns;
static std::condition_variable turns_changed;
static int running = 0;
static std::list<std::string> waiting;

Turn::Turn(const std::string& what) : what_(what) {
  static const int most = (int)option("KERNELS", 1);
  std::unique_lock<std::mutex> held(turns);
  auto own = waiting.insert(waiting.end(), what);
  turns_changed.wait(held, [] { return running < most; });
  waiting.erase(own);
  running++;
}

Turn::~Turn() {
  {
    std::lock_guard<std::mutex> held(turns);
    running--;
  }
  turns_changed.notify_all();
}

std::string waiting_for_a_turn() {
  std::lock_guard<std::mutex> held(turns);
  std::string found;
  for (auto& each : waiting) found += (found.empty() ? "" : "; ") + each;
  return found;
}

static socklen_t address_of(sockaddr_un* address, const std::string& id, int rank) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;  // the name of a path that begins with a zero needs no file
  int length = snprintf(address->sun_path + 1, 100, "emulated-nccl-%s-%d", id.c_str(), rank);
  return offsetof(sockaddr_un, sun_path) + 1 + length;
}

Communicator* meet(const std::string& id, int rank, int size) {
  static std::atomic<int> made{0};
  auto* communicator = new Communicator{rank, size, 0, made++, id, std::vector<int>(size, -1)};
  cudaGetDevice(&communicator->device);
  sockaddr_un address;
  auto length = address_of(&address, id, rank);
  int listening = socket(AF_UNIX, SOCK_STREAM, 0);
  if (bind(listening, (sockaddr*)&address, length) != 0 || listen(listening, 64) != 0) return nullptr;
  for (int lower = 0; lower < rank; lower++) {
    int to = socket(AF_UNIX, SOCK_STREAM, 0);
    length = address_of(&address, id, lower);
    for (int tries = 0; connect(to, (sockaddr*)&address, length) != 0; tries++) {
      if (tries == 60000) return nullptr;
      usleep(1000);
    }
    if (write(to, &rank, sizeof rank) != sizeof rank) return nullptr;
    communicator->sockets[lower] = to;
  }
  for (int higher = rank + 1; higher < size; higher++) {
    pollfd comes{listening, POLLIN, 0};
    if (poll(&comes, 1, 60000) <= 0) return nullptr;
    int from = accept(listening, nullptr, nullptr), who;
    if (read(from, &who, sizeof who) != sizeof who) return nullptr;
    communicator->sockets[who] = from;
  }
  close(listening);
  for (int each : communicator->sockets)
    if (each >= 0) fcntl(each, F_SETFL, O_NONBLOCK);
  return communicator;
}

static uint64_t sum_of(const Message& message) {
  if (timed()) return 0;
  uint64_t sum = 1469598103934665603ull;
  for (size_t k = 0; k < message.bytes; k++) sum = (sum ^ (unsigned char)message.at[k]) * 1099511628211ull;
  return sum;
}

[[noreturn]] static void end_with(const std::string& finding) {
  report(finding);
  fflush(stderr);
  _exit(77);
}

namespace {

struct Header {
  uint64_t op, bytes;
  int64_t begun;  // of the sender's stream
};

// What goes to one rank, or comes from it, in order.
struct Queue {
  std::vector<Message*> messages;
  size_t next = 0, done = 0;  // the message that is under way, and how many bytes of it, its header included
  Header header{};

  bool ended() const { return next == messages.size(); }
  size_t body() const { return messages[next]->hollow ? 0 : messages[next]->bytes; }
  void moved(size_t bytes) {
    done += bytes;
    if (done == sizeof header + body()) {
      next++;
      done = 0;
    }
  }
};

class Exchange {
 public:
  Exchange(Communicator* communicator, uint64_t op, const char* name, std::vector<Message>& messages)
      : communicator_(communicator), op_(op), name_(name), to_(communicator->size), from_(communicator->size) {
    for (auto& each : messages) {
      if (!each.sends && !timed()) memset(each.at, 0xFF, each.bytes);  // nothing that could be right, until it arrives
      (each.sends ? to_ : from_)[each.peer].messages.push_back(&each);
    }
    int own = communicator->rank;
    for (size_t k = 0; k < to_[own].messages.size(); k++)
      if (!to_[own].messages[k]->hollow) memcpy(from_[own].messages[k]->at, to_[own].messages[k]->at, to_[own].messages[k]->bytes);
  }

  bool run() {
    auto moved = std::chrono::steady_clock::now();
    static const double limit_s = option("STUCK_S", 20);
    for (;;) {
      std::vector<pollfd> asked;
      std::vector<int> ranks;
      for (int rank = 0; rank < communicator_->size; rank++) {
        if (rank == communicator_->rank) continue;
        short events = (to_[rank].ended() ? 0 : POLLOUT) | (from_[rank].ended() ? 0 : POLLIN);
        if (events == 0) continue;
        asked.push_back({communicator_->sockets[rank], events, 0});
        ranks.push_back(rank);
      }
      if (asked.empty()) return true;
      if (communicator_->aborted) return false;
      poll(asked.data(), asked.size(), 50);
      bool moves = false;
      for (size_t k = 0; k < asked.size(); k++) {
        if (asked[k].revents & POLLOUT) moves |= send_to(ranks[k]);
        if (asked[k].revents & (POLLIN | POLLHUP) && !from_[ranks[k]].ended()) moves |= receive_from(ranks[k]);
      }
      auto now = std::chrono::steady_clock::now();
      if (moves) moved = now;
      if (std::chrono::duration<double>(now - moved).count() < limit_s) continue;
      auto others = waiting_for_a_turn();
      if (!others.empty())
        end_with("DEADLOCK: " + text() + " waits for other ranks, and on this one waits for it: " + others +
                 ". Ranks began collectives of different communicators in different orders");
    }
  }

  std::string text() const {
    return std::string(name_) + " on communicator " + std::to_string(communicator_->number) + ", rank " +
           std::to_string(communicator_->rank);
  }

 private:
  bool send_to(int rank) {
    auto& queue = to_[rank];
    auto* message = queue.messages[queue.next];
    Header header{op_, message->bytes, begun_};
    bool head = queue.done < sizeof header;
    const char* at = head ? (const char*)&header + queue.done : message->at + queue.done - sizeof header;
    size_t left = head ? sizeof header - queue.done : queue.body() + sizeof header - queue.done;
    return moved(queue, send(communicator_->sockets[rank], at, left, MSG_NOSIGNAL), left);
  }

  bool receive_from(int rank) {
    auto& queue = from_[rank];
    auto* message = queue.messages[queue.next];
    bool head = queue.done < sizeof queue.header;
    char* at = head ? (char*)&queue.header + queue.done : message->at + queue.done - sizeof queue.header;
    size_t left = (head ? 0 : queue.body()) + sizeof queue.header - queue.done;
    ssize_t bytes = read(communicator_->sockets[rank], at, left);
    if (head && bytes == (ssize_t)left && (queue.header.op != op_ || queue.header.bytes != message->bytes)) {
      char there[80];
      snprintf(there, sizeof there, "kind %lx of %lu bytes", (long)queue.header.op, (long)queue.header.bytes);
      char here[80];
      snprintf(here, sizeof here, "kind %lx of %lu bytes", (long)op_, (long)message->bytes);
      end_with("MISMATCH: " + text() + " expects " + here + " from rank " + std::to_string(rank) + ", which sends " +
               there);
    }
    if (head && bytes == (ssize_t)left) stream_not_before(queue.header.begun);
    return moved(queue, bytes == 0 && left > 0 ? -1 : bytes, left);
  }

  bool moved(Queue& queue, ssize_t bytes, size_t) {
    if (bytes >= 0) {
      queue.moved(bytes);
      return true;
    }
    if (errno != EAGAIN) {
      communicator_->error = REMOTE_ERROR;
      usleep(1000);
    }
    return false;
  }

  Communicator* communicator_;
  uint64_t op_;
  const char* name_;
  const int64_t begun_ = stream_now();
  std::vector<Queue> to_, from_;
};

}  // namespace

bool exchange(Communicator* communicator, uint64_t op, const char* name, std::vector<Message>& messages) {
  std::vector<uint64_t> sums;
  for (auto& each : messages) sums.push_back(each.sends ? sum_of(each) : 0);
  Exchange all(communicator, op, name, messages);
  if (!all.run()) return false;
  for (size_t k = 0; k < messages.size(); k++)
    if (messages[k].sends && sum_of(messages[k]) != sums[k])
      report("OVERWRITTEN: memory that " + all.text() + " sends was written while it was under way");
  return true;
}

}  // namespace emulated
