// Shared by the stand-ins. libcudart.so.13 defines it; libnccl.so.2, the ops and the allocator use it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define SHARED __attribute__((visibility("default")))

namespace emulated {

// Memory that something enqueued on a stream reads, or writes, when it runs.
struct Access {
  const void* at;
  size_t bytes;
  bool writes;
};

// The number in the environment variable EMULATED_CUDA_<name>.
SHARED double option(const char* name, double otherwise);

// Writes down a defect of the program that runs: in the file EMULATED_CUDA_FINDINGS, and on stderr.
SHARED void report(const std::string& finding);

// Has a stream do something in its turn. Reports it where an access is not ordered with an earlier one; a timed run,
// which is to cost the host little, does not look.
//   what: named in findings; lives for ever.
//   ns: how long it takes, of a timed run.
SHARED void enqueue(cudaStream_t stream, std::function<void()> task, const std::vector<Access>& accesses, const char* what,
                    double ns = 0);

// Floating-point numbers of more bytes than these are neither computed nor sent in a timed run.
inline constexpr size_t FEW_BYTES = 1 << 16;

// Whether things take the time of a data sheet (`times.h`).
SHARED bool timed();
// The time of kernels that move bytes and multiply, of a copy between host and device, and of a collective for which a
// rank sends bytes in messages one after the other.
SHARED double kernel_ns(double bytes, double flops, double kernels);
SHARED double host_copy_ns(double bytes);
SHARED double link_ns(double bytes, double messages);
// The time of the stream that this is the thread of, which can be moved forward.
SHARED int64_t stream_now();
SHARED void stream_not_before(int64_t at);

// A text that lives for ever, one for all equal ones.
SHARED const char* forever(const std::string& text);

// The current device has a context from here on.
SHARED void use_device();

}  // namespace emulated
