// The ops of ATen on the emulated device: each is put in the place of the CUDA kernel that torch registered. What it
// computes is enqueued on the current stream, and computed there later by the CPU's kernel on the same addresses.
//
//   sizes of results   as the op on meta tensors finds them; where there is no such, or where they depend on values, the
//                      host waits for the device and computes at once. Only where sizes depend on values is that
//                      counted as a wait: CUDA would wait there too.
//   random numbers     from a generator of the CPU, seeded by the device generator's seed and offset: equal seeds give
//                      equal numbers, which are not CUDA's
//   left to torch      views, allocation, copies to and from the host, the value of a scalar
//
// Values are the CPU's: what a CUDA kernel rounds otherwise, or does in another order, is not shown.
#include "ops.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <unistd.h>

#include <set>
#include <unordered_map>
#include <variant>

namespace emulated {

using c10::IValue;

Raw::Raw(const at::Tensor& tensor)
    : at_(tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr()),
      bytes_(0),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      dtype_(tensor.scalar_type()),
      conjugate_(tensor.is_conj()),
      negative_(tensor.is_neg()) {
  if (at_ == nullptr) return;
  int64_t last = 0;
  for (size_t k = 0; k < sizes_.size(); k++) last += (sizes_[k] - 1) * strides_[k];
  bytes_ = (last + 1) * tensor.element_size();
}

at::Tensor Raw::on_host() const {
  auto options = at::TensorOptions(at::kCPU).dtype(dtype_);
  auto found = at_ == nullptr ? at::empty_strided(sizes_, strides_, options)
                              : at::from_blob(at_, sizes_, strides_, options);
  if (conjugate_) found._set_conj(true);
  if (negative_) found._set_neg(true);
  return found;
}

void enqueue_op(std::function<void()> task, const std::vector<Access>& accesses, const char* name, double ns) {
  auto guarded = [task = std::move(task), name] {
    try {
      at::AutoDispatchBelowAutograd below;
      at::NoGradGuard no_grad;
      task();
    } catch (const std::exception& error) {
      report(std::string("FAILED: ") + name + ": " + error.what());
      fflush(stderr);
      _exit(77);
    }
  };
  enqueue(c10::cuda::getCurrentCUDAStream(), guarded, accesses, name, ns);
}

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::empty_strided(sizes, strides, at::TensorOptions(at::kCUDA).dtype(dtype));
}

void wait_for_device() {
  c10::cuda::warn_or_error_on_sync();
  cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream());
}

namespace {

const std::set<std::string> SIZES_DEPEND_ON_VALUES = {
    "nonzero", "unique_dim", "_unique2", "_unique", "unique_consecutive", "masked_select", "repeat_interleave",
    "bincount", "equal", "histc", "_local_scalar_dense"};
const std::set<std::string> LEFT_TO_TORCH = {
    "empty", "empty_strided", "as_strided", "view", "_reshape_alias", "set_", "resize_", "record_stream", "is_pinned",
    "_pin_memory", "pin_memory", "unfold", "is_set_to", "_efficientzerotensor", "view_as_real", "view_as_complex",
    "alias", "_local_scalar_dense", "_has_compatible_shallow_copy_type", "resize_as_", "_conj", "_neg_view",
    "_copy_from", "_copy_from_and_resize", "_cslt_compress"};

Op op_of(const c10::OperatorHandle& handle) {
  auto& schema = handle.schema();
  Op op{forever(schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name())),
        schema.name().substr(schema.name().find("::") + 2)};
  for (auto& argument : schema.arguments()) {
    op.writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    op.is_out |= argument.is_out();
    if (argument.name() == "generator") op.generator = (int)op.writes.size() - 1;
  }
  for (auto& returned : schema.returns()) op.makes |= returned.alias_info() == nullptr;
  return op;
}

at::Tensor kept(const at::Tensor& of_host) {  // as it is now: the host may write it later
  auto copy = of_host.clone();
  if (of_host.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// A generator of the host, at the device generator's place, which moves on.
at::Generator seeded(const std::optional<at::Generator>& given) {
  auto generator = given && given->defined() ? *given : at::cuda::detail::getDefaultCUDAGenerator();
  auto* device = at::check_generator<at::CUDAGeneratorImpl>(generator);
  std::lock_guard<std::mutex> held(device->mutex_);
  auto seed = device->current_seed() * 6364136223846793005ull + device->get_offset();
  device->set_offset(device->get_offset() + 4);
  return at::detail::createCPUGenerator(seed);
}

// A call on the device: its arguments, and what becomes of them on the host.
class Call {
 public:
  Call(const Op& op, const c10::OperatorHandle& handle, Stack* stack) : op_(op), handle_(handle), stack_(stack) {
    size_t count = handle.schema().arguments().size();
    arguments_.assign(stack->end() - count, stack->end());
    torch::jit::drop(*stack, count);
    c10::DeviceIndex device = -1;
    for (auto& each : arguments_) {
      for_each_tensor(each, [&](const at::Tensor& tensor) {
        if (tensor.is_cuda() && device < 0) device = tensor.device().index();
      });
      if (each.isDevice() && each.toDevice().is_cuda() && device < 0) device = each.toDevice().index();
    }
    if (device >= 0) guard_.set_index(device);
  }

  void run() {
    bool at_once = SIZES_DEPEND_ON_VALUES.count(op_.base) != 0 || is_index_by_mask();
    if (at_once) {
      if (timed()) enqueue_op([] {}, {}, op_.name, timing_of(op_, arguments_, {}).ns);
      wait_for_device();
      return run_now();
    }
    if (op_.makes || op_.is_out) {
      try {
        plan();
      } catch (const c10::NotImplementedError&) {
        if (op_.is_out) throw;
        cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream());
        return run_now();
      }
    }
    run_later();
  }

 private:
  bool is_index_by_mask() const {
    if (op_.base != "index" && op_.base != "_unsafe_index") return false;
    bool found = false;
    for_each_tensor(arguments_[1], [&](const at::Tensor& index) {
      found |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    });
    return found;
  }

  // Finds the sizes of results, makes them, and gives tensors of an `out=` theirs.
  void plan() {
    auto found = sizes_of(op_, handle_, arguments_);
    for (size_t k = 0; op_.is_out && k < found.size(); k++)
      if (op_.writes[k] && arguments_[k].isTensor() && arguments_[k].toTensor().defined() &&
          arguments_[k].toTensor().sizes() != found[k].toTensor().sizes())
        arguments_[k].toTensor().resize_(found[k].toTensor().sizes());
    if (op_.is_out) return;
    for (auto& each : found)
      results_.push_back(with_tensors(each, [](const at::Tensor& tensor) {
        return empty_on_device(tensor.sizes(), tensor.strides(), tensor.scalar_type());
      }));
  }

  static std::variant<at::Tensor, Raw> capture_tensor(const at::Tensor& tensor) {
    if (tensor.is_cuda()) return Raw(tensor);
    return kept(tensor);
  }

  void run_later() {
    auto timing = timed() ? timing_of(op_, arguments_, results_) : Timing{};
    if (!timing.computed) return pass_time(timing.ns);
    std::vector<Access> accesses;
    std::vector<std::function<IValue()>> restored;
    for (size_t k = 0; k < arguments_.size(); k++) restored.push_back(capture(k, accesses));
    std::vector<std::vector<Raw>> into;
    for (auto& each : results_) {
      into.emplace_back();
      for_each_tensor(each, [&](const at::Tensor& tensor) {
        into.back().emplace_back(tensor);
        accesses.push_back(into.back().back().access(true));
      });
    }
    auto task = [handle = handle_, restored = std::move(restored), into = std::move(into)] {
      Stack stack;
      for (auto& each : restored) stack.push_back(each());
      handle.callBoxed(&stack);
      for (size_t k = 0; k < into.size(); k++) {
        size_t next = 0;
        for_each_tensor(stack[k], [&](const at::Tensor& found) {
          auto made = into[k][next++].on_host();
          made.copy_(found);
          if (timed() && made.is_floating_point()) at::nan_to_num_(made, 0, 0, 0);
        });
      }
    };
    enqueue_op(std::move(task), accesses, op_.name, timing.ns);
    give_back();
  }

  // What is not computed: memory is left as it is, but for small results, which the host may look at.
  void pass_time(double ns) {
    if (op_.generator >= 0) seeded(arguments_[op_.generator].toOptional<at::Generator>());
    std::vector<Raw> small;
    for (auto& each : results_)
      for_each_tensor(each, [&](const at::Tensor& tensor) {
        if (tensor.nbytes() <= FEW_BYTES) small.emplace_back(tensor);
      });
    auto task = [small = std::move(small)] {
      for (auto& each : small) each.on_host().zero_();
    };
    enqueue_op(std::move(task), {}, op_.name, ns);
    give_back();
  }

  // What gives an argument back on the stream. It keeps no memory of the device alive.
  std::function<IValue()> capture(size_t number, std::vector<Access>& accesses) {
    const IValue& value = arguments_[number];
    if ((int)number == op_.generator)
      return [generator = seeded(value.toOptional<at::Generator>())] { return IValue(generator); };
    std::vector<std::variant<at::Tensor, Raw>> tensors;
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      tensors.push_back(capture_tensor(tensor));
      if (tensor.is_cuda()) accesses.push_back(std::get<Raw>(tensors.back()).access(op_.writes[number]));
    });
    if (tensors.empty()) return [value = on(at::kCPU, value)] { return value; };
    // The shape of the tree, without its tensors.
    auto shape = with_tensors(value, [](const at::Tensor&) { return at::empty({0}, at::kCPU); });
    return [shape, tensors = std::move(tensors)] {
      size_t next = 0;
      return with_tensors(shape, [&](const at::Tensor&) {
        auto& tensor = tensors[next++];
        return tensor.index() == 0 ? std::get<at::Tensor>(tensor) : std::get<Raw>(tensor).on_host();
      });
    };
  }

  // Computes on the host, which has waited for the device, and has the results written there.
  void run_now() {
    std::vector<Access> accesses;
    Stack found;
    for (size_t k = 0; k < arguments_.size(); k++) found.push_back(capture(k, accesses)());
    enqueue_op([] {}, accesses, op_.name);  // for the order of what it reads
    {
      at::AutoDispatchBelowAutograd below;
      handle_.callBoxed(&found);
    }
    for (auto& each : found)
      results_.push_back(with_tensors(each, [&](const at::Tensor& value) {
        auto made = empty_on_device(value.sizes(), value.strides(), value.scalar_type());
        Raw into(made);
        enqueue_op([into, value] { into.on_host().copy_(value); }, {into.access(true)}, op_.name);
        return made;
      }));
    give_back();
  }

  void give_back() {
    if (op_.makes) {
      for (auto& each : results_) stack_->push_back(each);
      return;
    }
    size_t returned = handle_.schema().returns().size();
    for (size_t k = 0; k < arguments_.size() && returned > 0; k++)
      if (op_.writes[k]) {
        stack_->push_back(arguments_[k]);
        returned--;
      }
  }

  const Op& op_;
  const c10::OperatorHandle& handle_;
  Stack* stack_;
  Stack arguments_, results_;
  c10::cuda::OptionalCUDAGuard guard_;
};

void run_op(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
  static std::mutex lock;
  static auto* ops = new std::unordered_map<c10::OperatorName, Op>;
  const Op* op;
  {
    std::lock_guard<std::mutex> held(lock);
    auto found = ops->find(handle.operator_name());
    if (found == ops->end()) found = ops->emplace(handle.operator_name(), op_of(handle)).first;
    op = &found->second;
  }
  Call(*op, handle, stack).run();
}

// Between the device and the host torch's own code copies, and calls this again where it has to change a layout.
at::Tensor& copy_op(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  if (!self.is_cuda() || !source.is_cuda()) return at::native::copy_(self, source, non_blocking);
  c10::cuda::CUDAGuard guard(source.device());
  auto from = source.expand_as(self);
  Raw to(self), read(from);
  auto timing = timed() ? timing_of_copy(self, from) : Timing{};
  auto task = [=] {
    if (timing.computed) to.on_host().copy_(read.on_host());
  };
  enqueue_op(task, {read.access(false), to.access(true)}, "aten::copy_", timing.ns);
  return self;
}

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                         bool, std::optional<double>, bool) {
  return 0;  // torch's own composition of other ops
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (auto& each : schema.returns())
    if (each.alias_info() != nullptr && !each.alias_info()->isWrite()) return true;
  return false;
}

}  // namespace

void install_layers(torch::Library& library);

}  // namespace emulated

// Puts the ops into their places; returns how many. Called once, after torch has been imported.
EXPORTED int emulated_ops_install() {
  using namespace emulated;
  struct Quiet : c10::WarningHandler {  // torch warns of kernels that are replaced
    void process(const c10::Warning&) override {}
  } quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    auto handle = dispatcher.findSchema(name);
    if (!handle || name.getNamespace() != "aten") continue;
    auto base = name.name.substr(6);
    if (LEFT_TO_TORCH.count(base) != 0 || base == "copy_" || base == "_fused_sdp_choice") continue;
    if (base.rfind("_cudnn_rnn", 0) == 0 || base.rfind("_scaled_dot_product_efficient", 0) == 0 || returns_view(handle->schema())) continue;
    auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_op>());
    count++;
  }
  library.impl("copy_", TORCH_FN(copy_op));
  library.impl("_fused_sdp_choice", TORCH_FN(choose_attention));
  install_layers(library);
  return count;
}
