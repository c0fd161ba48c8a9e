// What an op of ATen becomes on the emulated device.
#pragma once

#include "emulated.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

namespace emulated {

// A tensor's memory, which this does not keep alive: only the program that runs does, and what the allocator was told.
class Raw {
 public:
  explicit Raw(const at::Tensor& tensor);
  at::Tensor on_host() const;
  Access access(bool writes) const { return {at_, bytes_, writes}; }

 private:
  void* at_;
  size_t bytes_;  // from the first element to the last
  std::vector<int64_t> sizes_, strides_;
  at::ScalarType dtype_;
  bool conjugate_, negative_;
};

// Has the current stream of the current device do something with tensors, given to it as tensors of the host.
void enqueue_op(std::function<void()> task, const std::vector<Access>& accesses, const char* name);

// A tensor for what an op returns, uninitialised, on the current device.
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// The host waits for the current stream, as torch's own ops do where a result's size depends on values.
void wait_for_device();

}  // namespace emulated
