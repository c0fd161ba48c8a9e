// What ops take in a timed run, and which of them are computed there: a CPU takes a thousand times as long as a GPU.
//
//   time      bytes read and written at the memory's rate, or multiplications at the data sheet's, whichever is longer,
//             and a start for each kernel; ops are one kernel, but for sorts
//   computed  what makes ids, counts and flags, for they decide what travels; of large masks and floating-point numbers
//             neither. Few numbers are computed, too: the program may look at them. What they are made of may not be,
//             so that nan and inf become 0: a loss that is neither must not end the run
#include "ops.h"

#include <algorithm>
#include <set>

namespace emulated {

static const std::set<std::string> TAKES_ROWS = {
    "embedding", "index_select", "gather", "index", "index_put_", "_index_put_impl_", "index_add_", "index_copy_",
    "index_fill_", "scatter_", "scatter_add_", "scatter_reduce_"};
static const std::set<std::string> FILLS = {"zero_", "fill_", "normal_", "uniform_", "random_", "copy_", "_foreach_zero_"};
static const std::set<std::string> SORTS = {
    "sort", "argsort", "unique_dim", "_unique2", "_unique", "unique_consecutive", "topk", "searchsorted"};
static constexpr double KERNELS_OF_A_SORT = 10;
static constexpr int64_t LARGE_MASK = 1 << 22;

static double traffic(const at::Tensor& tensor) {  // of what is expanded, once
  double elements = 1;
  for (int64_t k = 0; k < tensor.dim(); k++) elements *= tensor.stride(k) != 0 ? (double)tensor.size(k) : 1;
  return tensor.numel() == 0 ? 0 : elements * (double)tensor.element_size();
}

static bool decides(const at::Tensor& made) {
  if (made.scalar_type() == at::kBool) return made.numel() <= LARGE_MASK;
  return at::isIntegralType(made.scalar_type(), false);
}

static double flops_of(const std::string& op, const Stack& arguments) {
  bool adds = op.rfind("add", 0) == 0 || op.rfind("badd", 0) == 0 || op.rfind("_addmm", 0) == 0;
  if (op.find("mm") == std::string::npos || op.rfind("_foreach", 0) == 0) return 0;
  size_t left = adds ? 1 : 0;
  if (arguments.size() < left + 2 || !arguments[left].isTensor() || !arguments[left + 1].isTensor()) return 0;
  return 2.0 * (double)arguments[left].toTensor().numel() * (double)arguments[left + 1].toTensor().size(-1);
}

Timing timing_of(const Op& op, const Stack& arguments, const Stack& results) {
  double first = 0, others = 0, all = 0;
  bool needed = false, updates = !op.is_out && FILLS.count(op.base) == 0;
  auto visit = [&](const at::Tensor& tensor, bool writes, double& bytes) {
    if (!tensor.is_cuda()) return;
    all += traffic(tensor);
    bytes += traffic(tensor) * (writes && updates ? 2 : 1);
    needed |= writes && decides(tensor);
  };
  for (size_t k = 0; k < arguments.size(); k++)
    for_each_tensor(arguments[k], [&](const at::Tensor& each) { visit(each, op.writes[k], k == 0 ? first : others); });
  updates = false;  // results are new
  for (auto& result : results) for_each_tensor(result, [&](const at::Tensor& each) { visit(each, true, others); });
  if (TAKES_ROWS.count(op.base) != 0) first = std::min(first, 2 * others);
  double kernels = SORTS.count(op.base) != 0 ? KERNELS_OF_A_SORT : 1;
  return {needed || all <= FEW_BYTES, kernel_ns(first + others, flops_of(op.base, arguments), kernels)};
}

Timing timing_of_copy(const at::Tensor& to, const at::Tensor& from) {
  bool computed = decides(to) || to.nbytes() <= FEW_BYTES;
  return {computed, kernel_ns(traffic(to) + traffic(from), 0, 1)};
}

void enqueue_layer(std::function<void()> task, const std::vector<Access>& accesses, const char* name, double flops,
                   double kernels) {
  if (!timed()) return enqueue_op(std::move(task), accesses, name);
  double bytes = 0;
  for (auto& each : accesses) bytes += (double)each.bytes;
  enqueue_op([] {}, {}, name, kernel_ns(bytes, flops, kernels));
}

}  // namespace emulated
