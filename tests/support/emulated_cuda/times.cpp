#include "times.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace emulated {

static std::atomic<double>& slow() {
  static std::atomic<double> found{option("SLOW", 0)};
  return found;
}

static thread_local StreamClock* running = nullptr;

bool timed() { return slow() > 0; }

double kernel_ns(double bytes, double flops, double kernels) {
  static const double bytes_per_ns = option("MEMORY_GBS", 3352 * 0.7), flops_per_ns = option("TFLOPS", 66.9 * 0.7) * 1e3,
                      launch_ns = option("LAUNCH_US", 2) * 1e3;
  return slow() * (kernels * launch_ns + std::max(bytes / bytes_per_ns, flops / flops_per_ns));
}

double host_copy_ns(double bytes) {
  static const double bytes_per_ns = option("PCIE_GBS", 50);
  return kernel_ns(0, 0, 1) + slow() * bytes / bytes_per_ns;
}

double link_ns(double bytes, double messages) {
  static const double bytes_per_ns = option("LINK_GBS", 12.5), latency_ns = option("LINK_US", 20) * 1e3;
  return slow() * (bytes / bytes_per_ns + messages * latency_ns);
}

int64_t real_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool reached(int64_t at) { return !timed() || real_now() >= at; }

void reach(int64_t at) {
  if (!timed()) return;
  if (running != nullptr) return running->not_before(at);
  thread_local const int exact = prctl(PR_SET_TIMERSLACK, 1000ul);  // a sleep ends at most a microsecond late
  (void)exact;
  std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(at)));
}

int64_t stream_now() { return running != nullptr ? running->now() : real_now(); }

void stream_not_before(int64_t at) {
  if (running != nullptr) running->not_before(at);
}

void StreamClock::begin(int64_t enqueued) {
  running = this;
  not_before(enqueued);
}

void StreamClock::not_before(int64_t at) { at_ = std::max(at_.load(), at); }

void StreamClock::end(double ns) {
  at_ += (int64_t)ns;
  busy_ += (int64_t)ns;
}

}  // namespace emulated

// Everything that is enqueued from here on takes so many times as long as the data sheet says.
EXPORTED void emulated_cuda_slow_motion(double factor) { emulated::slow() = factor; }
