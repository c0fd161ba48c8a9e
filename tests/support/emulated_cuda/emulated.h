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

// Has a stream do something in its turn. Reports it where an access is not ordered with an earlier one.
//   what: named in findings; lives for ever.
SHARED void enqueue(cudaStream_t stream, std::function<void()> task, const std::vector<Access>& accesses, const char* what);

// A text that lives for ever, one for all equal ones.
SHARED const char* forever(const std::string& text);

// The current device has a context from here on.
SHARED void use_device();

}  // namespace emulated
