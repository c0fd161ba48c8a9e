// Time in the stand-in: what a data sheet says that things take, and streams that take it.
//
// A stream's clock runs ahead of real time: its thread does things as soon as it can, and notes when each would have
// ended. Something begins when the stream is free, the events that it waits for have passed, the other ranks of a
// collective have come, and the host has enqueued it, which it does in real time. Only the host is held up: what it asks
// about, or waits for, has not ended before real time has come so far. Nothing of the device has to sleep, and no thread
// has to be woken on time. Clocks are compared between processes of one machine.
#pragma once

#include "emulated.h"

#include <atomic>

namespace emulated {

// A stream's time, in nanoseconds of the steady clock.
class StreamClock {
 public:
  // On the stream's own thread: begins what was enqueued then.
  void begin(int64_t enqueued);
  // The stream stands still until then.
  void not_before(int64_t at);
  void end(double ns);
  int64_t now() const { return at_; }
  int64_t busy() const { return busy_; }

 private:
  std::atomic<int64_t> at_{0}, busy_{0};
};

int64_t real_now();
// Whether real time has come so far; it always has where runs are not timed.
bool reached(int64_t at);
// The stream that this is the thread of moves its clock, another thread sleeps.
void reach(int64_t at);

}  // namespace emulated
