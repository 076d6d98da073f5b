// Times MLA attention in a library of the ggml family, on the CPU, for time_peers.py.
//
//   ggml_times --peer=NAME --path=flash|matmul|expanded --kv=f16|bf16 --threads=N
//              [--rope-first] [--seconds=0.4] [--only=SHAPE,SHAPE]
//
// Prints a row {"peer", "shape", "threads", "us", "runs", "error"} a shape, with cpu_decode's and
// cpu_prefill's names of shapes. Each path is the graph that the library's own model code builds:
//   flash     llama.cpp with flash attention: one fused node over the latent rows, the heads as
//             queries of one KV head; prefill absorbs queries before and expands outputs after it
//   matmul    llama.cpp without it: two products, a softmax, and V transposed in each call
//   expanded  ik_llama.cpp: as flash for decode; prefill expands K and V of all rows, then attends
// Requests of a batch are the library's streams. ik_llama.cpp has none (it masks the requests of
// one common cache from each other, at a cost), so there each request is a node of one graph.
//
// A time is the median of as many calls as fit in --seconds, one at least; with several threads a
// pause and an untimed call precede each timed one, as in cpu_bench. Each result is held against
// fp64 on some heads and rows; above kLimit the shape gets no row and the program fails.
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#if __has_include(<ggml-cpu.h>)
#include <ggml-cpu.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kLatent = 512, kRope = 64, kRow = kLatent + kRope;
constexpr int64_t kNope = 128, kValue = 128;
constexpr float kScale = 0.135234f;  // cpu_bench's
constexpr double kLimit = 0.02;      // relative error in the Frobenius norm

struct Shape {
  std::string name;
  int64_t heads, rows, context, batch;
  bool IsPrefill() const { return rows > 1; }
};

struct Flags {
  std::string peer = "ggml", path = "flash", only;
  ggml_type kv = GGML_TYPE_F16;
  int threads = 1;
  bool rope_first = false;
  double seconds = 0.4;
};

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (const int64_t heads : {128, 16}) {
    const std::string prefix = "heads=" + std::to_string(heads);
    for (const int64_t context : {1024, 4096, 16384}) {
      shapes.push_back({prefix + " q=1 ctx=" + std::to_string(context), heads, 1, context, 1});
    }
    shapes.push_back({prefix + " q=1 batch=16 ctx=4096", heads, 1, 4096, 16});
    shapes.push_back({prefix + " q=512 kv=4096 with up-projection", heads, 512, 4096, 1});
  }
  return shapes;
}

// Normals that bf16 holds exactly, and f16 too but for the few below its range. They repeat after a
// count that has no factor in common with a row's length, so no two rows of a shape are the same.
std::vector<float> Normals(size_t count, uint32_t seed, float deviation) {
  constexpr size_t kPeriod = (size_t{1} << 20) + 7;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(count);
  for (size_t i = 0; i < std::min(count, kPeriod); ++i) {
    const float value = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x8000u) & 0xffff0000u;
    std::memcpy(&values[i], &bits, sizeof bits);
  }
  for (size_t i = kPeriod; i < count; ++i) values[i] = values[i - kPeriod];
  return values;
}

void Fill(ggml_tensor* tensor, const std::vector<float>& values) {
  if (tensor->type == GGML_TYPE_F32) {
    ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(float));
    return;
  }
  std::vector<uint16_t> halves(values.size());
  const int64_t count = static_cast<int64_t>(values.size());
  if (tensor->type == GGML_TYPE_F16) {
    ggml_fp32_to_fp16_row(values.data(), reinterpret_cast<ggml_fp16_t*>(halves.data()), count);
  } else {
    ggml_fp32_to_bf16_row(values.data(), reinterpret_cast<ggml_bf16_t*>(halves.data()), count);
  }
  ggml_backend_tensor_set(tensor, halves.data(), 0, halves.size() * sizeof(uint16_t));
}

// The inputs of one shape, its graph, and the check of the output.
class Attention {
 public:
  Attention(const Flags& flags, const Shape& shape);
  ~Attention();
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  void Run();
  // Largest relative error of the first and the last head, each in the first, a middle and the
  // last row.
  double Error() const;

 private:
  int64_t Rows() const { return shape_.rows * shape_.batch; }
  int64_t LatentAt() const { return flags_.rope_first ? kRope : 0; }
  int64_t RopeAt() const { return flags_.rope_first ? 0 : kLatent; }
  int64_t OutputDim() const { return shape_.IsPrefill() ? kValue : kLatent; }
  bool HasStreams() const { return flags_.path != "expanded"; }

  void MakeInputs();
  void FillInputs();
  ggml_tensor* Concat(ggml_tensor* latent, ggml_tensor* rope);
  ggml_tensor* AbsorbedQueries();
  ggml_tensor* Flash(ggml_tensor* q, ggml_tensor* k, ggml_tensor* v);
  ggml_tensor* Absorbed(ggml_tensor* q, int64_t first, int64_t count);
  ggml_tensor* Matmul(ggml_tensor* q, ggml_tensor* k, ggml_tensor* v);
  ggml_tensor* Expanded();
  std::vector<double> Reference(int64_t request, int64_t row, int64_t head) const;

  const Flags flags_;
  const Shape shape_;
  ggml_backend_t backend_;
  ggml_context *inputs_, *nodes_;
  ggml_backend_buffer_t buffer_ = nullptr;
  ggml_gallocr_t allocator_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  // q_ is [heads, rows] of absorbed queries in decode, of their unrotated part in prefill.
  ggml_tensor *q_ = nullptr, *rope_ = nullptr, *kv_ = nullptr, *mask_ = nullptr;
  ggml_tensor *w_uk_ = nullptr, *w_uv_ = nullptr;  // as the path wants them
  std::vector<ggml_tensor*> outputs_;              // one, or one a request
  std::vector<float> q_values_, rope_values_, kv_values_, uk_values_, uv_values_;
};

ggml_context* MakeContext() {
  ggml_init_params params{};
  params.mem_size = size_t{16} << 20;
  params.no_alloc = true;
  return ggml_init(params);
}

Attention::Attention(const Flags& flags, const Shape& shape)
    : flags_(flags),
      shape_(shape),
      backend_(ggml_backend_cpu_init()),
      inputs_(MakeContext()),
      nodes_(MakeContext()) {
  ggml_backend_cpu_set_n_threads(backend_, flags.threads);
  MakeInputs();
  buffer_ = ggml_backend_alloc_ctx_tensors(inputs_, backend_);
  FillInputs();
  graph_ = ggml_new_graph(nodes_);
  if (shape.IsPrefill() && flags.path == "expanded") {
    outputs_.push_back(Expanded());
  } else {
    ggml_tensor* q = shape.IsPrefill() ? AbsorbedQueries() : q_;
    const int64_t together = HasStreams() ? shape.batch : 1;
    for (int64_t first = 0; first < shape.batch; first += together) {
      outputs_.push_back(Absorbed(q, first, together));
    }
  }
  for (ggml_tensor* output : outputs_) {
    ggml_set_output(output);
    ggml_build_forward_expand(graph_, output);
  }
  allocator_ = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
  if (!ggml_gallocr_alloc_graph(allocator_, graph_)) std::abort();
}

Attention::~Attention() {
  ggml_gallocr_free(allocator_);
  ggml_backend_buffer_free(buffer_);
  ggml_free(nodes_);
  ggml_free(inputs_);
  ggml_backend_free(backend_);
}

void Attention::MakeInputs() {
  const int64_t heads = shape_.heads;
  kv_ = ggml_new_tensor_4d(inputs_, flags_.kv, kRow, shape_.context, 1, shape_.batch);
  q_ = ggml_new_tensor_3d(inputs_, GGML_TYPE_F32, shape_.IsPrefill() ? kNope : kRow, heads, Rows());
  int64_t mask_rows = shape_.rows;
#ifdef GGML_KQ_MASK_PAD
  mask_rows = GGML_PAD(mask_rows, GGML_KQ_MASK_PAD);
#endif
  mask_ = ggml_new_tensor_4d(inputs_, flags_.path == "matmul" ? GGML_TYPE_F32 : GGML_TYPE_F16,
                             shape_.context, mask_rows, 1, HasStreams() ? shape_.batch : 1);
  if (!shape_.IsPrefill()) return;
  rope_ = ggml_new_tensor_3d(inputs_, GGML_TYPE_F32, kRope, heads, Rows());
  if (flags_.path == "expanded") {
    w_uk_ = ggml_new_tensor_2d(inputs_, GGML_TYPE_BF16, kLatent, heads * (kNope + kValue));
  } else {
    w_uk_ = ggml_new_tensor_3d(inputs_, GGML_TYPE_BF16, kNope, kLatent, heads);
    w_uv_ = ggml_new_tensor_3d(inputs_, GGML_TYPE_BF16, kLatent, kValue, heads);
  }
}

void Attention::FillInputs() {
  kv_values_ = Normals(static_cast<size_t>(ggml_nelements(kv_)), 1, 1.0f);
  q_values_ = Normals(static_cast<size_t>(ggml_nelements(q_)), 2, 1.0f);
  Fill(kv_, kv_values_);
  Fill(q_, q_values_);
  const int64_t mask_rows = mask_->ne[1];
  std::vector<float> mask(static_cast<size_t>(ggml_nelements(mask_)), 0.0f);
  for (int64_t row = 0; shape_.IsPrefill() && row < mask_rows; ++row) {
    const auto begin = mask.begin() + row * shape_.context;
    std::fill(begin + shape_.context - shape_.rows + row + 1, begin + shape_.context, -INFINITY);
  }
  Fill(mask_, mask);
  if (!shape_.IsPrefill()) return;
  rope_values_ = Normals(static_cast<size_t>(ggml_nelements(rope_)), 3, 1.0f);
  Fill(rope_, rope_values_);
  // [head][nope][latent] and [head][value][latent]; deviations that keep the logits' as in decode.
  const size_t count = static_cast<size_t>(shape_.heads * kNope * kLatent);
  uk_values_ = Normals(count, 4, 1.0f / std::sqrt(static_cast<float>(kNope)));
  uv_values_ = Normals(count, 5, 1.0f / std::sqrt(static_cast<float>(kLatent)));
  std::vector<float> stored(count);
  if (flags_.path == "expanded") {
    std::vector<float> both;
    const int64_t part = kNope * kLatent;
    for (int64_t head = 0; head < shape_.heads; ++head) {
      both.insert(both.end(), &uk_values_[head * part], &uk_values_[head * part] + part);
      both.insert(both.end(), &uv_values_[head * part], &uv_values_[head * part] + part);
    }
    Fill(w_uk_, both);
    return;
  }
  for (int64_t head = 0; head < shape_.heads; ++head) {
    for (int64_t i = 0; i < kNope; ++i) {
      for (int64_t j = 0; j < kLatent; ++j) {
        stored[(head * kLatent + j) * kNope + i] = uk_values_[(head * kNope + i) * kLatent + j];
      }
    }
  }
  Fill(w_uk_, stored);
  Fill(w_uv_, uv_values_);
}

ggml_tensor* Attention::Concat(ggml_tensor* latent, ggml_tensor* rope) {
  return flags_.rope_first ? ggml_concat(nodes_, rope, latent, 0)
                           : ggml_concat(nodes_, latent, rope, 0);
}

ggml_tensor* Attention::AbsorbedQueries() {
  ggml_tensor* latent = ggml_mul_mat(nodes_, w_uk_, ggml_permute(nodes_, q_, 0, 2, 1, 3));
  return Concat(ggml_permute(nodes_, latent, 0, 2, 1, 3), rope_);
}

// Returns [dim, heads, rows, streams], as Matmul does.
ggml_tensor* Attention::Flash(ggml_tensor* q, ggml_tensor* k, ggml_tensor* v) {
  return ggml_flash_attn_ext(nodes_, q, k, v, mask_, kScale, 0.0f, 0.0f);
}

ggml_tensor* Attention::Matmul(ggml_tensor* q, ggml_tensor* k, ggml_tensor* v) {
  ggml_tensor* logits = ggml_mul_mat(nodes_, k, q);
  logits = ggml_soft_max_ext(nodes_, logits, mask_, kScale, 0.0f);
  v = ggml_cont(nodes_, ggml_transpose(nodes_, v));
  ggml_tensor* out = ggml_mul_mat(nodes_, v, logits);
  if (shape_.IsPrefill()) out = ggml_mul_mat(nodes_, w_uv_, out);
  return ggml_cont(nodes_, ggml_permute(nodes_, out, 0, 2, 1, 3));
}

// Attention of `count` requests from `first` on over latent rows, the heads as rows of one KV head.
ggml_tensor* Attention::Absorbed(ggml_tensor* q, int64_t first, int64_t count) {
  q = ggml_view_4d(nodes_, q, kRow, shape_.heads, shape_.rows, count, q->nb[1], q->nb[2],
                   q->nb[2] * shape_.rows, q->nb[2] * shape_.rows * first);
  q = ggml_permute(nodes_, q, 0, 2, 1, 3);
  const size_t element = ggml_type_size(kv_->type);
  ggml_tensor* k = ggml_view_4d(nodes_, kv_, kRow, shape_.context, 1, count, kv_->nb[1], kv_->nb[2],
                                kv_->nb[3], kv_->nb[3] * first);
  ggml_tensor* v = ggml_view_4d(nodes_, kv_, kLatent, shape_.context, 1, count, kv_->nb[1],
                                kv_->nb[2], kv_->nb[3], kv_->nb[3] * first + element * LatentAt());
  if (flags_.path == "matmul") return Matmul(q, k, v);
  ggml_tensor* out = Flash(q, k, v);
  if (!shape_.IsPrefill()) return out;
  out = ggml_mul_mat(nodes_, w_uv_, ggml_permute(nodes_, out, 0, 2, 1, 3));
  return ggml_cont(nodes_, ggml_permute(nodes_, out, 0, 2, 1, 3));
}

// Attention over K and V of all heads, which are computed from the latent rows first.
ggml_tensor* Attention::Expanded() {
  const int64_t heads = shape_.heads, context = shape_.context;
  const size_t element = ggml_type_size(kv_->type);
  ggml_tensor* latent =
      ggml_view_2d(nodes_, kv_, kLatent, context, kv_->nb[1], element * LatentAt());
  ggml_tensor* rope =
      ggml_view_3d(nodes_, kv_, kRope, context, 1, kv_->nb[1], kv_->nb[2], element * RopeAt());
  rope = ggml_repeat(nodes_, rope, ggml_new_tensor_3d(nodes_, flags_.kv, kRope, context, heads));
  ggml_tensor* q = ggml_permute(nodes_, Concat(q_, rope_), 0, 2, 1, 3);
  ggml_tensor* both = ggml_mul_mat(nodes_, w_uk_, latent);
  const size_t row = ggml_row_size(both->type, heads * (kNope + kValue));
  const size_t head = ggml_row_size(both->type, kNope + kValue);
  ggml_tensor* v = ggml_view_3d(nodes_, both, kValue, context, heads, row, head,
                                ggml_row_size(both->type, kNope));
  ggml_tensor* k = ggml_view_3d(nodes_, both, kNope, context, heads, row, head, 0);
  v = ggml_cast(nodes_, v, flags_.kv);
  k = Concat(ggml_cast(nodes_, k, flags_.kv), rope);
  return Flash(q, k, v);
}

void Attention::Run() {
  if (ggml_backend_graph_compute(backend_, graph_) != GGML_STATUS_SUCCESS) std::abort();
}

std::vector<double> Attention::Reference(int64_t request, int64_t row, int64_t head) const {
  const int64_t at = (request * shape_.rows + row) * shape_.heads + head;
  std::vector<double> latent(kLatent), rope(kRope);
  if (shape_.IsPrefill()) {
    for (int64_t i = 0; i < kNope; ++i) {
      for (int64_t j = 0; j < kLatent; ++j) {
        latent[j] += static_cast<double>(q_values_[at * kNope + i]) *
                     uk_values_[(head * kNope + i) * kLatent + j];
      }
    }
    for (int64_t i = 0; i < kRope; ++i) rope[i] = rope_values_[at * kRope + i];
  } else {
    for (int64_t i = 0; i < kLatent; ++i) latent[i] = q_values_[at * kRow + LatentAt() + i];
    for (int64_t i = 0; i < kRope; ++i) rope[i] = q_values_[at * kRow + RopeAt() + i];
  }
  const int64_t seen = shape_.context - shape_.rows + row + 1;
  const float* kv = &kv_values_[static_cast<size_t>(request * shape_.context * kRow)];
  std::vector<double> weights(static_cast<size_t>(seen));
  double most = -INFINITY, sum = 0.0;
  for (int64_t i = 0; i < seen; ++i) {
    double logit = 0.0;
    for (int64_t j = 0; j < kLatent; ++j) logit += latent[j] * kv[i * kRow + LatentAt() + j];
    for (int64_t j = 0; j < kRope; ++j) logit += rope[j] * kv[i * kRow + RopeAt() + j];
    weights[i] = logit * kScale;
    most = std::max(most, weights[i]);
  }
  std::vector<double> mean(kLatent);
  for (int64_t i = 0; i < seen; ++i) {
    const double weight = std::exp(weights[i] - most);
    sum += weight;
    for (int64_t j = 0; j < kLatent; ++j) mean[j] += weight * kv[i * kRow + LatentAt() + j];
  }
  for (double& value : mean) value /= sum;
  if (!shape_.IsPrefill()) return mean;
  std::vector<double> out(kValue);
  for (int64_t i = 0; i < kValue; ++i) {
    for (int64_t j = 0; j < kLatent; ++j) {
      out[i] += mean[j] * uv_values_[(head * kValue + i) * kLatent + j];
    }
  }
  return out;
}

double Attention::Error() const {
  double worst = 0.0;
  std::vector<float> got(static_cast<size_t>(OutputDim()));
  const int64_t rows_an_output = Rows() / static_cast<int64_t>(outputs_.size());
  for (const int64_t row : {int64_t{0}, Rows() / 2, Rows() - 1}) {
    for (const int64_t head : {int64_t{0}, shape_.heads - 1}) {
      const std::vector<double> want = Reference(row / shape_.rows, row % shape_.rows, head);
      const int64_t at = (row % rows_an_output * shape_.heads + head) * OutputDim();
      ggml_backend_tensor_get(outputs_[static_cast<size_t>(row / rows_an_output)], got.data(),
                              static_cast<size_t>(at) * sizeof(float), got.size() * sizeof(float));
      double difference = 0.0, size = 0.0;
      for (size_t i = 0; i < got.size(); ++i) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
      }
      // A NaN must not pass as small.
      const double error = std::sqrt(difference / size);
      worst = error <= worst ? worst : error;
    }
  }
  return worst;
}

bool TimeShape(const Flags& flags, const Shape& shape) {
  using Clock = std::chrono::steady_clock;
  Attention attention(flags, shape);
  attention.Run();
  const double error = attention.Error();
  if (!(error <= kLimit)) {
    std::fprintf(stderr, "ggml_times: %s: %s: relative error %g, limit %g\n", flags.peer.c_str(),
                 shape.name.c_str(), error, kLimit);
    return false;
  }
  std::vector<double> times;
  const auto end = Clock::now() + std::chrono::duration<double>(flags.seconds);
  while (times.empty() || Clock::now() < end) {
    if (flags.threads > 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(15));
      attention.Run();
    }
    const auto begin = Clock::now();
    attention.Run();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  const auto middle = times.begin() + static_cast<int64_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  std::printf(
      "{\"peer\": \"%s\", \"shape\": \"%s\", \"threads\": %d, \"us\": %.1f, "
      "\"runs\": %zu, \"error\": %.2e}\n",
      flags.peer.c_str(), shape.name.c_str(), flags.threads, *middle, times.size(), error);
  std::fflush(stdout);
  return true;
}

bool Value(std::string_view argument, std::string_view name, std::string* value) {
  if (!argument.starts_with(name)) return false;
  *value = argument.substr(name.size());
  return true;
}

Flags ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    std::string value;
    if (Value(argument, "--peer=", &flags.peer) || Value(argument, "--only=", &flags.only)) {
      continue;
    }
    if (Value(argument, "--path=", &value) &&
        (value == "flash" || value == "matmul" || value == "expanded")) {
      flags.path = value;
    } else if (argument == "--kv=f16" || argument == "--kv=bf16") {
      flags.kv = argument == "--kv=f16" ? GGML_TYPE_F16 : GGML_TYPE_BF16;
    } else if (Value(argument, "--threads=", &value)) {
      flags.threads = std::max(1, std::atoi(value.c_str()));
    } else if (Value(argument, "--seconds=", &value)) {
      flags.seconds = std::atof(value.c_str());
    } else if (argument == "--rope-first") {
      flags.rope_first = true;
    } else {
      std::fprintf(stderr,
                   "usage: %s --peer=NAME --path=flash|matmul|expanded --kv=f16|bf16 --threads=N "
                   "[--rope-first] [--seconds=0.4] [--only=SHAPE,SHAPE]\n",
                   argv[0]);
      std::exit(2);
    }
  }
  return flags;
}

}  // namespace

int main(int argc, char** argv) {
  const Flags flags = ParseFlags(argc, argv);
  bool all = true;
  const std::string wanted = "," + flags.only + ",";
  for (const Shape& shape : Shapes()) {
    if (!flags.only.empty() && wanted.find("," + shape.name + ",") == std::string::npos) continue;
    all = TimeShape(flags, shape) && all;
  }
  return all ? 0 : 1;
}
