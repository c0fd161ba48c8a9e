// What an op of ATen becomes on the emulated device.
#pragma once

#include "emulated.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
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
void enqueue_op(std::function<void()> task, const std::vector<Access>& accesses, const char* name, double ns = 0);

// The same of a layer of a library, which is not computed in a timed run.
void enqueue_layer(std::function<void()> task, const std::vector<Access>& accesses, const char* name, double flops,
                   double kernels);

// A tensor for what an op returns, uninitialised, on the current device.
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// The host waits for the current stream, as torch's own ops do where a result's size depends on values.
void wait_for_device();

// What is known of an op from its schema.
struct Op {
  const char* name;
  std::string base;
  std::vector<bool> writes;  // by argument
  int generator = -1;  // which argument is one
  bool is_out = false, makes = false;  // makes: returns new tensors
};

// What an op returns, on meta tensors; of an `out=`, its arguments. Throws where it has no such kernel.
using torch::jit::Stack;
Stack sizes_of(const Op& op, const c10::OperatorHandle& handle, const Stack& arguments);
// A device's name among arguments, if it is that, in the words of another one.
c10::IValue on(c10::Device device, const c10::IValue& value);

// Of an op in a timed run: whether it is computed, and how long it takes.
struct Timing {
  bool computed = true;
  double ns = 0;
};
Timing timing_of(const Op& op, const Stack& arguments, const Stack& results);
Timing timing_of_copy(const at::Tensor& to, const at::Tensor& from);

// A tree of arguments with every tensor replaced.
template <class F>
c10::IValue with_tensors(const c10::IValue& value, F&& replace) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& each : value.toTensorVector()) found.push_back(each.defined() ? replace(each) : each);
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      found.push_back(each && each->defined() ? std::optional(replace(*each)) : each);
    return found;
  }
  return value;
}

template <class F>
void for_each_tensor(const c10::IValue& value, F&& visit) {
  with_tensors(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

}  // namespace emulated
