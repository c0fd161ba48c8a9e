// cuDNN's recurrent layers, by the CPU's, and its attention; without dropout, which draws numbers of its own.
#include "ops.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

namespace emulated {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalRaw = std::optional<Raw>;

enum Mode { RELU, TANH, LSTM, GRU };  // cuDNN's numbers

bool is_given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

// What a layer is, but for its tensors.
struct Layer {
  int64_t mode, layers, per_layer;  // per_layer: weights of a layer and direction
  bool batch_first, train, bidirectional;
  std::vector<int64_t> batch_sizes;  // of a packed sequence; empty: there is none
};

// The CPU's layer: output, last hidden states, and of an LSTM last cell states.
std::vector<Tensor> run_layer(const Layer& layer, const Tensor& input, at::TensorList weights, const Tensor& hidden,
                              const Tensor& cells) {
  bool biases = layer.per_layer >= 4;
  auto packed = layer.batch_sizes.empty() ? Tensor() : at::tensor(layer.batch_sizes, at::kLong);
  auto as_vector = [](auto&& found) { return std::vector<Tensor>{std::get<0>(found), std::get<1>(found)}; };
  if (layer.mode == LSTM) {
    std::vector<Tensor> state{hidden, cells};
    auto [output, last, last_cells] =
        packed.defined()
            ? at::lstm(input, packed, state, weights, biases, layer.layers, 0.0, layer.train, layer.bidirectional)
            : at::lstm(input, state, weights, biases, layer.layers, 0.0, layer.train, layer.bidirectional, layer.batch_first);
    return {output, last, last_cells};
  }
  auto whole = [&](auto&& op) {
    return as_vector(op(input, hidden, weights, biases, layer.layers, 0.0, layer.train, layer.bidirectional, layer.batch_first));
  };
  auto of_packed = [&](auto&& op) {
    return as_vector(op(input, packed, hidden, weights, biases, layer.layers, 0.0, layer.train, layer.bidirectional));
  };
  using Whole = std::tuple<Tensor, Tensor> (*)(const Tensor&, const Tensor&, at::TensorList, bool, int64_t, double, bool, bool, bool);
  using Packed = std::tuple<Tensor, Tensor> (*)(const Tensor&, const Tensor&, const Tensor&, at::TensorList, bool, int64_t, double, bool, bool);
  static const std::map<int64_t, std::pair<Whole, Packed>> ops = {
      {GRU, {at::gru, at::gru}}, {RELU, {at::rnn_relu, at::rnn_relu}}, {TANH, {at::rnn_tanh, at::rnn_tanh}}};
  auto& [of_whole, of_parts] = ops.at(layer.mode);
  return packed.defined() ? of_packed(of_parts) : whole(of_whole);
}

Tensor like(const Tensor& tensor, at::IntArrayRef sizes) {
  return at::empty(sizes, tensor.options().memory_format(at::MemoryFormat::Contiguous));
}

std::vector<Raw> raw_of(at::TensorList tensors) { return {tensors.begin(), tensors.end()}; }

std::vector<Tensor> on_host(const std::vector<Raw>& tensors) {
  std::vector<Tensor> found;
  for (auto& each : tensors) found.push_back(each.on_host());
  return found;
}

Layer layer_of(at::TensorList weights, int64_t per_layer, int64_t mode, int64_t layers, bool batch_first, double dropout,
               bool train, bool bidirectional, c10::SymIntArrayRef batch_sizes) {
  TORCH_CHECK(dropout == 0 || !train, "the emulated cuDNN has no dropout within a recurrent layer");
  Layer layer{mode, layers, per_layer, batch_first, train, bidirectional, {}};
  for (auto& each : batch_sizes) layer.batch_sizes.push_back(each.expect_int());
  return layer;
}

// Multiplications of a forward, and its kernels: a step of a layer waits for the one before.
std::pair<double, double> work_of(const Layer& layer, const Tensor& input, at::TensorList weights) {
  double products = 0, tokens = (double)input.numel() / (double)input.size(-1);
  for (auto& each : weights)
    if (each.dim() == 2) products += (double)each.numel();
  auto whole = input.size(layer.batch_first ? 1 : 0);
  double length = layer.batch_sizes.empty() ? (double)whole : (double)layer.batch_sizes.size();
  return {2 * products * tokens, (double)layer.layers * length};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> cudnn_rnn(
    const Tensor& input, at::TensorList weights, int64_t per_layer, const OptionalTensor& buffer, const Tensor& hidden,
    const OptionalTensor& cells, int64_t mode, c10::SymInt hidden_size, c10::SymInt projection, int64_t layers,
    bool batch_first, double dropout, bool train, bool bidirectional, c10::SymIntArrayRef batch_sizes,
    const OptionalTensor&) {
  c10::cuda::CUDAGuard guard(input.device());
  auto layer = layer_of(weights, per_layer, mode, layers, batch_first, dropout, train, bidirectional, batch_sizes);
  auto sizes = input.sizes().vec();
  sizes.back() = (projection > 0 ? projection : hidden_size).expect_int() * (bidirectional ? 2 : 1);
  auto output = like(input, sizes), last = like(hidden, hidden.sizes());
  auto last_cells = is_given(cells) ? like(*cells, cells->sizes()) : like(input, {0});
  auto reserve = at::empty({16}, input.options().dtype(at::kByte));
  Raw given(input), state(hidden), cell_state(is_given(cells) ? *cells : last_cells);
  std::vector<Raw> of_weights = raw_of(weights), into = raw_of({output, last, last_cells});
  std::vector<Access> accesses{given.access(false), state.access(false)};
  if (is_given(cells)) accesses.push_back(cell_state.access(false));
  for (auto& each : of_weights) accesses.push_back(each.access(false));
  for (auto& each : into) accesses.push_back(each.access(true));
  auto task = [=] {
    auto found = run_layer(layer, given.on_host(), on_host(of_weights), state.on_host(), cell_state.on_host());
    for (size_t k = 0; k < found.size(); k++) into[k].on_host().copy_(found[k]);
  };
  auto [flops, kernels] = work_of(layer, input, weights);
  enqueue_layer(task, accesses, "aten::_cudnn_rnn", flops, kernels);
  return {output, last, last_cells, reserve, is_given(buffer) ? *buffer : like(input, {0})};
}

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> cudnn_rnn_backward(
    const Tensor& input, at::TensorList weights, int64_t per_layer, const Tensor&, const Tensor& hidden,
    const OptionalTensor& cells, const Tensor&, const OptionalTensor& of_output, const OptionalTensor& of_last,
    const OptionalTensor& of_last_cells, int64_t mode, c10::SymInt, c10::SymInt, int64_t layers, bool batch_first,
    double dropout, bool train, bool bidirectional, c10::SymIntArrayRef batch_sizes, const OptionalTensor&, const Tensor&,
    std::array<bool, 4>) {
  c10::cuda::CUDAGuard guard(input.device());
  auto layer = layer_of(weights, per_layer, mode, layers, batch_first, dropout, train, bidirectional, batch_sizes);
  std::vector<Tensor> read{input, hidden}, written;
  if (is_given(cells)) read.push_back(*cells);
  size_t states = read.size();
  read.insert(read.end(), weights.begin(), weights.end());
  std::vector<Access> accesses;
  std::vector<Raw> given = raw_of(read), into;
  for (auto& each : given) accesses.push_back(each.access(false));
  for (auto& each : read) {
    written.push_back(like(each, each.sizes()));
    into.emplace_back(written.back());
    accesses.push_back(into.back().access(true));
  }
  std::vector<OptionalRaw> tangents;
  for (auto& each : {of_output, of_last, of_last_cells}) {
    tangents.push_back(is_given(each) ? OptionalRaw(Raw(*each)) : std::nullopt);
    if (tangents.back()) accesses.push_back(tangents.back()->access(false));
  }
  auto task = [=] {
    std::vector<Tensor> leaves, outputs, gradients;
    for (auto& each : given) leaves.push_back(each.on_host().detach().clone().requires_grad_());
    c10::impl::IncludeDispatchKeyGuard include(c10::autograd_dispatch_keyset);
    c10::impl::ForceDispatchKeyGuard all((c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})));
    at::AutoGradMode enabled(true);
    auto of_weights = at::TensorList(leaves).slice(states);
    auto found = run_layer(layer, leaves[0], of_weights, leaves[1], states == 3 ? leaves[2] : Tensor());
    for (size_t k = 0; k < found.size(); k++) {
      if (!tangents[k]) continue;
      outputs.push_back(found[k]);
      gradients.push_back(tangents[k]->on_host().clone());
    }
    auto of_leaves = torch::autograd::grad(outputs, leaves, gradients, std::nullopt, false, true);
    at::NoGradGuard no_grad;
    for (size_t k = 0; k < into.size(); k++) {
      if (of_leaves[k].defined()) into[k].on_host().copy_(of_leaves[k]);
      else into[k].on_host().zero_();
    }
  };
  auto [flops, kernels] = work_of(layer, input, weights);
  enqueue_layer(task, accesses, "aten::_cudnn_rnn_backward", 2 * flops, kernels);
  auto of_cells = states == 3 ? written[2] : like(input, {0});
  return {written[0], written[1], of_cells, std::vector<Tensor>(written.begin() + states, written.end())};
}

// Under autocast. torch's own asks cuDNN for how its buffer of weights is laid out.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> cudnn_rnn_autocast(
    const Tensor& input, at::TensorList weights, int64_t per_layer, const OptionalTensor& buffer, const Tensor& hidden,
    const OptionalTensor& cells, int64_t mode, c10::SymInt hidden_size, c10::SymInt projection, int64_t layers,
    bool batch_first, double dropout, bool train, bool bidirectional, c10::SymIntArrayRef batch_sizes,
    const OptionalTensor& dropout_state) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  auto dtype = at::autocast::get_autocast_dtype(at::kCUDA);
  auto cast = [&](const Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, at::kCUDA); };
  std::vector<Tensor> of_weights;
  for (auto& each : weights) of_weights.push_back(cast(each));
  return at::_cudnn_rnn_symint(cast(input), of_weights, per_layer, OptionalTensor(), cast(hidden),
                               is_given(cells) ? OptionalTensor(cast(*cells)) : cells, mode, hidden_size, projection, layers,
                               batch_first, dropout, train, bidirectional, batch_sizes, dropout_state);
}

// One buffer for all weights, which become views of it.
Tensor flatten_weights(at::TensorList weights, int64_t, c10::SymInt, int64_t, c10::SymInt, c10::SymInt, int64_t, bool, bool) {
  c10::cuda::CUDAGuard guard(weights[0].device());
  int64_t total = 0, at = 0;
  for (auto& each : weights) total += each.numel();
  auto buffer = at::zeros({total}, weights[0].options());
  for (Tensor each : weights) {
    auto part = buffer.narrow(0, at, each.numel()).view(each.sizes());
    part.copy_(each);
    each.set_(buffer.storage(), at, each.sizes(), part.strides());
    at += part.numel();
  }
  return buffer;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const OptionalTensor& bias, bool, double dropout, bool causal,
                                                     std::optional<double> scale) {
  TORCH_CHECK(dropout == 0, "the emulated attention has no dropout");
  c10::cuda::CUDAGuard guard(query.device());
  auto output = like(query, {query.size(0), query.size(2), query.size(1), value.size(3)}).transpose(1, 2);
  auto sums = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  auto nothing = at::empty({}, query.options().dtype(at::kLong));
  Raw q(query), k(key), v(value), into(output);
  OptionalRaw mask = is_given(bias) ? OptionalRaw(Raw(*bias)) : std::nullopt;
  std::vector<Access> accesses{q.access(false), k.access(false), v.access(false), into.access(true)};
  if (mask) accesses.push_back(mask->access(false));
  auto task = [=] {
    auto given = mask ? OptionalTensor(mask->on_host()) : std::nullopt;
    auto found = at::_scaled_dot_product_attention_math(q.on_host(), k.on_host(), v.on_host(), given, 0.0, causal, {}, scale);
    into.on_host().copy_(std::get<0>(found));
  };
  double flops = 4.0 * (double)query.numel() * (double)key.size(2);
  enqueue_layer(task, accesses, "aten::_scaled_dot_product_efficient_attention", flops, 1);
  return {output, sums, nothing, nothing.clone()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& tangent, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor&,
    const Tensor&, const Tensor&, const Tensor&, double dropout, std::array<bool, 4> wanted, bool causal,
    std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  std::vector<Tensor> read{query, key, value}, written;
  if (bias.defined()) read.push_back(bias);
  std::vector<Access> accesses;
  std::vector<Raw> given = raw_of(read), into;
  for (auto& each : given) accesses.push_back(each.access(false));
  for (auto& each : read) {
    written.push_back(at::empty_like(each));
    into.emplace_back(written.back());
    accesses.push_back(into.back().access(true));
  }
  Raw of_output(tangent);
  accesses.push_back(of_output.access(false));
  auto task = [=] {
    std::vector<Tensor> leaves;
    for (auto& each : given) leaves.push_back(each.on_host().detach().clone().requires_grad_());
    c10::impl::ForceDispatchKeyGuard all((c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})));
    at::AutoGradMode enabled(true);
    auto mask = leaves.size() == 4 ? OptionalTensor(leaves[3]) : std::nullopt;
    auto found = at::_scaled_dot_product_attention_math(leaves[0], leaves[1], leaves[2], mask, 0.0, causal, {}, scale);
    auto gradients = torch::autograd::grad({std::get<0>(found)}, leaves, {of_output.on_host().clone()}, std::nullopt, false, true);
    at::NoGradGuard no_grad;
    for (size_t k = 0; k < into.size(); k++) {
      if (gradients[k].defined()) into[k].on_host().copy_(gradients[k]);
      else into[k].on_host().zero_();
    }
  };
  double flops = 10.0 * (double)query.numel() * (double)key.size(2);
  enqueue_layer(task, accesses, "aten::_scaled_dot_product_efficient_attention_backward", flops, 1);
  return {written[0], written[1], written[2], written.size() == 4 && wanted[3] ? written[3] : Tensor()};
}

}  // namespace

void install_layers(torch::Library& library) {
  static torch::Library autocast(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastCUDA, __FILE__, __LINE__);
  autocast.impl("_cudnn_rnn", TORCH_FN(cudnn_rnn_autocast));
  library.impl("_cudnn_rnn", TORCH_FN(cudnn_rnn));
  library.impl("_cudnn_rnn_backward", TORCH_FN(cudnn_rnn_backward));
  library.impl("_cudnn_rnn_flatten_weight", TORCH_FN(flatten_weights));
  library.impl("_scaled_dot_product_efficient_attention", TORCH_FN(attention));
  library.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(attention_backward));
}

}  // namespace emulated
