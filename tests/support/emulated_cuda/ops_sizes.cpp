// Sizes of an op's results, as it finds them on meta tensors. That may take Python a millisecond, a hundred times as long as
// a launch takes CUDA: what was found once for arguments of the same sizes, types and numbers is known from then on.
#include "ops.h"

#include <ATen/ATen.h>

#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>

namespace emulated {

using c10::IValue;

// Sizes of their results follow from those of their arguments, but on meta tensors otherwise than on a device.
static const std::set<std::string> SIZES_BY_RUNNING = {"_embedding_bag", "_embedding_bag_forward_only"};
static constexpr size_t MOST_KNOWN = 100'000;

static at::Tensor as_meta(const at::Tensor& tensor) {
  if (!tensor.is_cuda() && tensor.dim() == 0) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(at::kMeta).dtype(tensor.scalar_type()));
}

static at::Tensor as_zeros(const at::Tensor& tensor) {
  return at::zeros(tensor.sizes(), at::TensorOptions(at::kCPU).dtype(tensor.scalar_type()));
}

IValue on(c10::Device device, const IValue& value) {
  return value.isDevice() && value.toDevice().is_cuda() ? IValue(device) : value;
}

static void write(std::string& key, char kind, std::initializer_list<int64_t> numbers) {
  key += kind;
  for (auto each : numbers) key.append((const char*)&each, sizeof each);
}

static void write_tensor(std::string& key, const at::Tensor& tensor) {
  if (!tensor.defined()) return write(key, 'u', {});
  bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  write(key, 't', {tensor.dim(), (int64_t)tensor.scalar_type(), tensor.is_cuda(), wrapped});
  for (int64_t k = 0; k < tensor.dim(); k++) write(key, ',', {tensor.size(k), tensor.stride(k)});
}

// Writes down what sizes can depend on; false: it is not known whether this is all.
static bool write_value(std::string& key, const IValue& value) {
  if (value.isTensor()) write_tensor(key, value.toTensor());
  else if (value.isNone() || value.isGenerator()) write(key, 'n', {});
  else if (value.isBool()) write(key, 'b', {value.toBool()});
  else if (value.isInt()) write(key, 'i', {value.toInt()});
  else if (value.isDevice()) write(key, 'd', {(int64_t)value.toDevice().type()});
  else if (value.isDouble()) {
    double number = value.toDouble();
    key.append("f").append((const char*)&number, sizeof number);
  } else if (value.isString()) {
    write(key, 's', {(int64_t)value.toStringRef().size()});
    key += value.toStringRef();
  } else if (value.isList()) {
    auto elements = value.toListRef();
    write(key, 'l', {(int64_t)elements.size()});
    for (auto& each : elements)
      if (!write_value(key, each)) return false;
  } else {
    return false;
  }
  return true;
}

static Stack found_by_calling(const Op& op, const c10::OperatorHandle& handle, const Stack& arguments) {
  c10::impl::ExcludeDispatchKeyGuard no_python(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  at::AutoDispatchBelowAutograd below;
  bool by_running = SIZES_BY_RUNNING.count(op.base) != 0;
  Stack given;
  for (auto& each : arguments)
    given.push_back(each.isGenerator() ? IValue()
                                       : with_tensors(on(by_running ? at::kCPU : at::kMeta, each),
                                                      by_running ? as_zeros : as_meta));
  Stack found = given;
  handle.callBoxed(&found);
  return op.is_out ? given : found;
}

Stack sizes_of(const Op& op, const c10::OperatorHandle& handle, const Stack& arguments) {
  static std::mutex lock;
  static auto* known = new std::unordered_map<std::string, Stack>;
  std::string key = op.name;
  write(key, ':', {(int64_t)c10::typeMetaToScalarType(at::get_default_dtype())});
  for (auto& each : arguments)
    if (!write_value(key, each)) return found_by_calling(op, handle, arguments);
  {
    std::lock_guard<std::mutex> held(lock);
    auto found = known->find(key);
    if (found != known->end()) return found->second;
  }
  auto found = found_by_calling(op, handle, arguments);
  std::lock_guard<std::mutex> held(lock);
  if (known->size() == MOST_KNOWN) known->clear();
  (*known)[key] = found;
  return found;
}

}  // namespace emulated
