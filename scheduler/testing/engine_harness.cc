#include "scheduler/testing/engine_harness.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "base/splitmix.h"
#include "kernels/backend_registry.h"
#include "kernels/reference/reference_backend.h"

namespace mla::scheduler::testing {
namespace {

void Require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "harness: %s\n", what.c_str());
  std::abort();
}

const std::byte* Bytes(const std::vector<kernels::Bf16>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

std::vector<kernels::Bf16> Encode(const std::vector<Row>& rows) {
  std::vector<kernels::Bf16> out;
  for (const Row& row : rows) {
    for (const float value : row) out.push_back(kernels::ToBf16(value));
  }
  return out;
}

}  // namespace

Row MakeRow(uint64_t key, int dim) {
  Row row(dim);
  for (int i = 0; i < dim; ++i) {
    const uint64_t bits = SplitMix(key * 1000003u + static_cast<uint64_t>(i));
    const float unit = static_cast<float>(bits >> 40) / static_cast<float>(1 << 24);
    row[i] = kernels::ToFloat(kernels::ToBf16(2 * unit - 1));
  }
  return row;
}

void DenseAttention(const ModelSpec& model, const std::vector<const Row*>& rows, const Row& q,
                    Row* output, double* lse) {
  const int lora = model.geometry.kv_lora_rank;
  std::vector<double> logits;
  double largest = -std::numeric_limits<double>::infinity();
  for (const Row* row : rows) {
    double dot = 0;
    for (size_t i = 0; i < q.size(); ++i) dot += double{q[i]} * (*row)[i];
    logits.push_back(dot * model.softmax_scale);
    largest = std::max(largest, logits.back());
  }
  double sum = 0;
  std::vector<double> out(lora, 0.0);
  for (size_t j = 0; j < rows.size(); ++j) {
    const double weight = std::exp(logits[j] - largest);
    sum += weight;
    for (int i = 0; i < lora; ++i) out[i] += weight * (*rows[j])[i];
  }
  output->assign(lora, 0.0f);
  for (int i = 0; i < lora && sum > 0; ++i) (*output)[i] = static_cast<float>(out[i] / sum);
  *lse = sum > 0 ? largest + std::log(sum) : -std::numeric_limits<double>::infinity();
}

std::vector<Row> Rows(int count, uint64_t key) {
  std::vector<Row> rows;
  rows.reserve(static_cast<size_t>(count));
  const auto dim = static_cast<int>(TinyModel().geometry.kv_row_dim());
  for (int i = 0; i < count; ++i) rows.push_back(MakeRow(key * 1000 + i, dim));
  return rows;
}

std::vector<const Row*> Pointers(const std::vector<Row>& a, const std::vector<Row>& b) {
  std::vector<const Row*> pointers;
  pointers.reserve(a.size() + b.size());
  for (const Row& row : a) pointers.push_back(&row);
  for (const Row& row : b) pointers.push_back(&row);
  return pointers;
}

Limits TinyLimits() {
  Limits limits;
  limits.kv_cache_bytes = 1 << 20;
  limits.default_page_size = 3;
  limits.max_sequences = 16;
  limits.max_sequence_rows = 96;
  limits.max_pages_per_sequence = 32;
  limits.max_models = 2;
  limits.max_layers = 4;
  limits.max_heads = 4;
  limits.max_row_dim = 16;
  limits.max_v_dim = 8;
  limits.weights_bytes = 1 << 20;
  limits.max_step_rows = 24;
  limits.max_step_sequences = 4;
  limits.max_open_steps = 6;
  limits.max_participants = 3;
  limits.queue_requests = 64;
  limits.launch_rows = 12;
  limits.launch_packed_rows = 32;
  limits.launch_requests = 16;
  limits.prefill_rows = 5;
  // Launches are bounded by rows only, so that no test depends on the speed of the machine.
  limits.launch_ms = 60'000;
  limits.decode_rows = 2;
  limits.sequence_lease_ms = 10000;
  limits.step_lease_ms = 2000;
  limits.kv_wait_ms = 500;
  limits.queue_ms = 30000;
  return limits;
}

ModelSpec TinyModel() {
  ModelSpec model;
  model.id = "tiny";
  model.geometry.num_heads = 2;
  model.geometry.kv_lora_rank = 8;
  model.geometry.rope_dim = 4;
  model.geometry.nope_dim = 6;
  model.geometry.v_dim = 5;
  model.layers = 2;
  model.softmax_scale = 0.5;
  return model;
}

EngineHarness::EngineHarness(HarnessOptions options) : clock_(1'000'000), model_(options.model) {
  std::unique_ptr<kernels::AttentionBackend> backend = std::move(options.backend);
  if (backend == nullptr) backend = std::make_unique<kernels::ReferenceBackend>();
  EngineOptions engine;
  engine.limits = options.limits;
  engine.tenants = options.tenants;
  engine.observer = options.observer;
  engine.tier_path = options.tier_path;
  engine.tier_threads = 0;
  uint64_t next_id = 0;
  auto core = EngineCore::Create(engine, std::move(backend), &clock_,
                                 [next_id]() mutable { return SplitMix(++next_id); });
  Require(core.ok(), std::string(core.status().message()));
  core_ = *std::move(core);
  const TenantRef tenant = *core_->tenants().Enter(tenant_);
  auto registered = core_->models().Register(tenant->key(), model_);
  Require(registered.ok(), std::string(registered.status().message()));
}

SequenceInfo EngineHarness::Open(const std::string& request_id, int64_t lease_ms) {
  OpenArgs args;
  args.tenant = tenant_;
  args.model_id = model_.id;
  args.request_id = request_id;
  args.lease_ms = lease_ms;
  auto info = core_->sequences().Open(args);
  Require(info.ok(), std::string(info.status().message()));
  return *info;
}

SequenceInfo EngineHarness::Get(SequenceId id) {
  const SequenceList list = core_->sequences().Get({tenant_, {id}, ""});
  Require(list.sequences.size() == 1, "the sequence is not open");
  return list.sequences[0];
}

void EngineHarness::Submit(StreamRequest* request) {
  const absl::Status admitted = core_->answers().Admit(request, clock_.Now());
  Require(admitted.ok(), std::string(admitted.message()));
  core_->steps().Accept(request);
}

std::unique_ptr<TestRequest> EngineHarness::Begin(StreamId stream, StepId step,
                                                  std::vector<StepSequenceArgs> sequences,
                                                  int participants) {
  auto request = std::make_unique<TestRequest>();
  request->kind = RequestKind::kBeginStep;
  request->stream = stream;
  request->step_id = step;
  request->begin.model_id = model_.id;
  request->begin.sequences = std::move(sequences);
  request->begin.participants = participants;
  Submit(request.get());
  return request;
}

void EngineHarness::FillQueries(TestRequest* request, uint64_t q_key) {
  AttendArgs& args = request->attend;
  std::vector<Row> rows;
  for (int row = 0; row < args.row_count; ++row) {
    for (int head = 0; head < args.num_heads; ++head) {
      const uint64_t key = q_key + uint64_t(args.row_begin + row) * 64 + args.head_offset + head;
      rows.push_back(MakeRow(key, model_.geometry.absorbed_q_dim()));
    }
  }
  request->queries = Encode(rows);
  const size_t packed = size_t(args.row_count) * args.num_heads;
  request->output.assign(packed * model_.o_dim(Profile::kAbsorbed), std::nanf(""));
  request->lse.assign(packed, std::nanf(""));
  args.want_lse = true;
  args.o_dtype = kernels::DType::kF32;
  args.q = Bytes(request->queries);
  args.o = reinterpret_cast<std::byte*>(request->output.data());
  args.lse = request->lse.data();
}

std::unique_ptr<TestRequest> EngineHarness::Attend(StreamId stream, StepId step, int layer,
                                                   int row_begin, const std::vector<Row>& kv,
                                                   uint64_t q_key) {
  return Slice(stream, step, layer, row_begin, static_cast<int>(kv.size()), kv, 0,
               model_.geometry.num_heads, q_key);
}

std::unique_ptr<TestRequest> EngineHarness::Query(StreamId stream, StepId step, int layer,
                                                  int row_begin, int rows, int head, int heads,
                                                  uint64_t q_key) {
  return Slice(stream, step, layer, row_begin, rows, {}, head, heads, q_key);
}

std::unique_ptr<TestRequest> EngineHarness::Slice(StreamId stream, StepId step, int layer,
                                                  int row_begin, int rows,
                                                  const std::vector<Row>& kv, int head, int heads,
                                                  uint64_t q_key) {
  auto request = Unsent(stream, step, layer, row_begin, rows, kv, head, heads, q_key);
  Submit(request.get());
  return request;
}

std::unique_ptr<TestRequest> EngineHarness::Unsent(StreamId stream, StepId step, int layer,
                                                   int row_begin, int rows,
                                                   const std::vector<Row>& kv, int head, int heads,
                                                   uint64_t q_key) {
  auto request = std::make_unique<TestRequest>();
  request->stream = stream;
  request->step_id = step;
  request->attend.layer = layer;
  request->attend.row_begin = row_begin;
  request->attend.row_count = rows;
  request->attend.head_offset = head;
  request->attend.num_heads = heads;
  request->attend.has_kv = !kv.empty();
  request->kv_rows = Encode(kv);
  request->attend.kv = Bytes(request->kv_rows);
  FillQueries(request.get(), q_key);
  return request;
}

std::unique_ptr<TestRequest> EngineHarness::AppendOnly(StreamId stream, StepId step, int layer,
                                                       int row_begin, const std::vector<Row>& kv) {
  auto request = std::make_unique<TestRequest>();
  request->stream = stream;
  request->step_id = step;
  request->attend.layer = layer;
  request->attend.row_begin = row_begin;
  request->attend.row_count = static_cast<int32_t>(kv.size());
  request->attend.profile = Profile::kAppendOnly;
  request->attend.has_kv = true;
  request->kv_rows = Encode(kv);
  request->attend.kv = Bytes(request->kv_rows);
  Submit(request.get());
  return request;
}

std::unique_ptr<TestRequest> EngineHarness::End(StreamId stream, StepId step,
                                                std::vector<int32_t> rows,
                                                std::vector<TailArgs> tails) {
  auto request = std::make_unique<TestRequest>();
  request->kind = RequestKind::kEndStep;
  request->end.tails = std::move(tails);
  request->stream = stream;
  request->step_id = step;
  request->end.committed_rows = std::move(rows);
  Submit(request.get());
  return request;
}

std::shared_ptr<const Tail> EngineHarness::MakeTail(size_t bytes, uint8_t value) {
  const auto row = core_->tenants().Enter(tenant());
  const auto amount = static_cast<int64_t>(bytes);
  if (!core_->tenants().TryTake(**row, Resource::kTailBytes, amount)) return nullptr;
  auto tail = std::make_shared<Tail>(
      bytes, TenantUse(&core_->tenants(), *row, Resource::kTailBytes, amount));
  std::memset(tail->data.get(), value, bytes);
  return tail;
}

std::unique_ptr<TestRequest> EngineHarness::Abort(StreamId stream, StepId step) {
  auto request = std::make_unique<TestRequest>();
  request->kind = RequestKind::kAbortStep;
  request->stream = stream;
  request->step_id = step;
  Submit(request.get());
  return request;
}

void EngineHarness::Run() {
  while (core_->launches().Start() | core_->launches().Complete(/*wait=*/true)) {
  }
}

double EngineHarness::Error(const TestRequest& request, const std::vector<const Row*>& rows,
                            const std::vector<int>& visible, uint64_t q_key) {
  const AttendArgs& args = request.attend;
  const int lora = model_.geometry.kv_lora_rank;
  double worst = 0;
  for (int row = 0; row < args.row_count; ++row) {
    const std::vector<const Row*> seen(rows.begin(), rows.begin() + visible[row]);
    for (int head = 0; head < args.num_heads; ++head) {
      const uint64_t key = q_key + uint64_t(args.row_begin + row) * 64 + args.head_offset + head;
      Row want;
      double lse = 0;
      DenseAttention(model_, seen, MakeRow(key, model_.geometry.absorbed_q_dim()), &want, &lse);
      const size_t packed = size_t(row) * args.num_heads + head;
      const float* got = &request.output[packed * lora];
      for (int i = 0; i < lora; ++i) {
        // A NaN counts as an infinite error.
        const double off = std::abs(got[i] - want[i]);
        worst = std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max(worst, off);
      }
      const double off = std::abs(request.lse[packed] - lse);
      worst = std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max(worst, off);
    }
  }
  return worst;
}

}  // namespace mla::scheduler::testing
