// What libcudart.so.13 consists of: devices, their streams, events, memory. One lock for all that is enqueued.
#pragma once

#include "hazards.h"
#include "times.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace emulated {

// Held while something is enqueued, so that streams and hazards see one order. Never held by a thread that waits.
extern std::mutex enqueuing;
extern Hazards& hazards;

// A thread of the host waits, and is counted. It lets go of Python's lock meanwhile: what it waits for may run Python.
class HostWait {
 public:
  HostWait();
  ~HostWait();

 private:
  void* saved_ = nullptr;
  const int64_t began_;
};

// What an event's record leaves behind: whether its stream has come to it.
class Passed {
 public:
  void set();
  void wait();
  bool query();

  Clock clock;  // what has ended then
  int64_t at = 0;

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool done_ = false;
};

// A worker thread that does what it is given, in order. Between two things it may tarry: at random, or always if it is
// the slow stream of EMULATED_CUDA_SLOW_STREAM, by number of first use.
class Stream {
 public:
  Stream(int device, int priority) : device(device), priority(priority) {}
  void put(std::function<void()> task, double ns = 0);
  void wait();
  bool query();
  bool begun();  // it was given something
  int number();  // from the first use on

  const int device, priority;
  StreamClock clock;

 private:
  struct Task {
    std::function<void()> run;
    int64_t enqueued;
    double ns;
  };

  void run();
  void tarry();

  std::mutex lock_;
  std::condition_variable changed_, idle_;
  std::deque<Task> tasks_;
  std::mt19937 random_;
  bool busy_ = false, begun_ = false;
  int number_ = -1;
};

struct Event {
  std::shared_ptr<Passed> last;  // under `enqueuing`
};

Stream* stream_of(cudaStream_t stream);
std::vector<Stream*> streams_of_device(int device);  // those that have begun

enum class Kind { unknown, host, device };
struct Range {
  size_t bytes;
  Kind kind;
  int device;
};
Range range_of(const void* at);

// How often threads of the host waited, and how long, those of torch that watch NCCL not counted.
struct HostWaits {
  std::atomic<long> streams{0}, events{0}, copies{0}, ns{0};
};
extern HostWaits host_waits;
bool watches_nccl();

int current_device();
int device_count();
cudaError_t failed(cudaError_t error);
cudaError_t refused(const char* what);

}  // namespace emulated
