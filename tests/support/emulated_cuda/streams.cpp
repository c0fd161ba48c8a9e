// Streams, events, and the waits of the host.
#include "runtime.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace emulated {

std::mutex enqueuing;
Hazards& hazards = *new Hazards;  // never destroyed: streams outlive the end of the program
HostWaits host_waits;

double option(const char* name, double otherwise) {
  const char* value = getenv((std::string("EMULATED_CUDA_") + name).c_str());
  return value != nullptr ? atof(value) : otherwise;
}

void report(const std::string& finding) {
  {
    static auto* told = new std::set<std::string>;  // one defect shows in many places
    static std::mutex lock;
    std::lock_guard<std::mutex> held(lock);
    if (told->size() == 100 || !told->insert(finding).second) return;
  }
  std::string line = "[emulated CUDA, process " + std::to_string(getpid()) + "] " + finding + "\n";
  fputs(line.c_str(), stderr);
  const char* path = getenv("EMULATED_CUDA_FINDINGS");
  if (path == nullptr) return;
  int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
  if (file < 0 || write(file, line.data(), line.size()) < 0) perror(path);
  close(file);
}

const char* forever(const std::string& text) {
  static std::mutex lock;
  static auto* texts = new std::set<std::string>;
  std::lock_guard<std::mutex> held(lock);
  return texts->insert(text).first->c_str();
}

bool watches_nccl() {
  thread_local const bool found = [] {
    char name[32] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return strncmp(name, "pt_nccl", 7) == 0;
  }();
  return found;
}

HostWait::HostWait() : began_(real_now()) {
  static auto begun = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  static auto held = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
  static auto save = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  if (begun != nullptr && begun() && held()) saved_ = save();
}

HostWait::~HostWait() {
  if (!watches_nccl()) host_waits.ns += real_now() - began_;
  static auto restore = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  if (saved_ != nullptr) restore(saved_);
}

void Passed::set() {
  {
    std::lock_guard<std::mutex> held(lock_);
    done_ = true;
    at = timed() ? stream_now() : real_now();
  }
  changed_.notify_all();
}

void Passed::wait() {
  {
    std::unique_lock<std::mutex> held(lock_);
    changed_.wait(held, [&] { return done_; });
  }
  reach(at);
}

bool Passed::query() {
  std::lock_guard<std::mutex> held(lock_);
  return done_ && reached(at);
}

void Stream::put(std::function<void()> task, double ns) {
  number();
  {
    std::lock_guard<std::mutex> held(lock_);
    tasks_.push_back({std::move(task), timed() ? real_now() : 0, ns});
    if (!begun_) {
      begun_ = true;
      std::thread([this] { run(); }).detach();
    }
  }
  changed_.notify_one();
}

void Stream::run() {
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> held(lock_);
      changed_.wait(held, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
    }
    tarry();
    clock.begin(task.enqueued);
    task.run();
    clock.end(task.ns);
    task.run = nullptr;
    std::lock_guard<std::mutex> held(lock_);
    busy_ = false;
    if (tasks_.empty()) idle_.notify_all();
  }
}

void Stream::tarry() {
  static const double jitter = option("JITTER_US", 0), slow = option("SLOW_STREAM", -1), by = option("SLOW_US", 500);
  double us = slow == number_ ? by : 0;
  if (jitter >= 1 && random_() % 4 == 0) us += random_() % (unsigned)jitter;
  if (us > 0) usleep((useconds_t)us);
}

void Stream::wait() {
  {
    std::unique_lock<std::mutex> held(lock_);
    idle_.wait(held, [&] { return tasks_.empty() && !busy_; });
  }
  reach(clock.now());
}

bool Stream::query() {
  std::lock_guard<std::mutex> held(lock_);
  return tasks_.empty() && !busy_ && reached(clock.now());
}

bool Stream::begun() {
  std::lock_guard<std::mutex> held(lock_);
  return begun_;
}

int Stream::number() {
  static std::atomic<int> next{0};
  std::lock_guard<std::mutex> held(lock_);
  if (number_ < 0) {
    number_ = next++;
    random_.seed((unsigned)option("SEED", 0) * 7919 + number_);
  }
  return number_;
}

static std::vector<Stream*>& all_streams() {
  static auto* streams = new std::vector<Stream*>;  // the first of them are the devices' own
  if (streams->empty())
    for (int device = 0; device < device_count(); device++) streams->push_back(new Stream(device, 0));
  return *streams;
}

Stream* stream_of(cudaStream_t stream) {  // 0, 1 and 2 are names of the current device's own
  return (uintptr_t)stream > 2 ? (Stream*)stream : all_streams()[current_device()];
}

std::vector<Stream*> streams_of_device(int device) {
  std::vector<Stream*> found;
  for (auto* each : all_streams())
    if (each->device == device && each->begun()) found.push_back(each);
  return found;
}

static std::atomic<long> enqueued{0};

void enqueue(cudaStream_t stream, std::function<void()> task, const std::vector<Access>& accesses, const char* what,
             double ns) {
  enqueued++;
  std::lock_guard<std::mutex> held(enqueuing);
  auto* on = stream_of(stream);
  if (!timed()) hazards.enqueue(on->number(), accesses, what);
  on->put(std::move(task), ns);
}

}  // namespace emulated

using namespace emulated;

EXPORTED void emulated_cuda_host_waits(long* counts) {
  counts[0] = host_waits.streams;
  counts[1] = host_waits.events;
  counts[2] = host_waits.copies;
}

// How many things were enqueued; nanoseconds that the host waited, that the current device's own stream was busy, and
// that all its streams were.
EXPORTED void emulated_cuda_times(long* found) {
  std::lock_guard<std::mutex> held(enqueuing);
  found[0] = enqueued;
  found[1] = host_waits.ns;
  found[2] = stream_of(nullptr)->clock.busy();
  found[3] = 0;
  for (auto* each : streams_of_device(current_device())) found[3] += each->clock.busy();
}

static void wait_for(Stream* stream) {
  Clock clock;
  {
    std::lock_guard<std::mutex> held(enqueuing);
    clock = hazards.record(stream->number());
  }
  HostWait waits;
  stream->wait();
  std::lock_guard<std::mutex> held(enqueuing);
  hazards.host_saw(clock);
}

EXPORTED cudaError_t cudaDeviceSynchronize() {
  if (!watches_nccl()) host_waits.streams++;
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> held(enqueuing);
    streams = streams_of_device(current_device());
  }
  for (auto* each : streams)
    if (!each->query()) wait_for(each);
  std::lock_guard<std::mutex> held(enqueuing);
  for (auto* each : streams) hazards.host_saw(hazards.record(each->number()));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int priority) {
  use_device();
  std::lock_guard<std::mutex> held(enqueuing);
  auto* stream = new Stream(current_device(), priority);
  all_streams().push_back(stream);
  *made = (cudaStream_t)stream;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}
EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::lock_guard<std::mutex> held(enqueuing);
  auto* found = stream_of(stream);
  if (!found->query()) return failed(cudaErrorNotReady);
  if (!watches_nccl()) hazards.host_saw(hazards.record(found->number()));
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (!watches_nccl()) host_waits.streams++;
  wait_for(stream_of(stream));
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard<std::mutex> held(enqueuing);
  auto passed = ((Event*)event)->last;
  if (passed == nullptr) return cudaSuccess;  // CUDA takes such a wait for nothing
  auto* waits = stream_of(stream);
  hazards.wait(waits->number(), passed->clock);
  waits->put([passed] { passed->wait(); });
  return cudaSuccess;
}
EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  enqueue(stream, [=] { function(data); }, {}, "a host function");
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  enqueue(stream, [=] { function(stream, cudaSuccess, data); }, {}, "a callback");
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  use_device();
  *made = (cudaEvent_t) new Event;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto passed = std::make_shared<Passed>();
  std::lock_guard<std::mutex> held(enqueuing);
  auto* on = stream_of(stream);
  passed->clock = hazards.record(on->number());
  ((Event*)event)->last = passed;
  on->put([passed] { passed->set(); });
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard<std::mutex> held(enqueuing);
  auto passed = ((Event*)event)->last;
  if (passed == nullptr) return cudaSuccess;
  if (!passed->query()) return failed(cudaErrorNotReady);
  if (!watches_nccl()) hazards.host_saw(passed->clock);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (!watches_nccl()) host_waits.events++;
  std::shared_ptr<Passed> passed;
  {
    std::lock_guard<std::mutex> held(enqueuing);
    passed = ((Event*)event)->last;
  }
  if (passed == nullptr) return cudaSuccess;
  HostWait waits;
  passed->wait();
  std::lock_guard<std::mutex> held(enqueuing);
  if (!watches_nccl()) hazards.host_saw(passed->clock);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  std::lock_guard<std::mutex> held(enqueuing);
  auto from = ((Event*)begin)->last, to = ((Event*)end)->last;
  if (from == nullptr || to == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (!from->query() || !to->query()) return failed(cudaErrorNotReady);
  *ms = (float)(to->at - from->at) / 1e6f;
  return cudaSuccess;
}
