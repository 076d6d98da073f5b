// Drives an EngineCore by hand in one thread. Requests record their answers, the clock is simulated
// and the backend is the reference one. The answers of the tiny model are computed densely, without
// the product's code.
#ifndef MLA_SCHEDULER_TESTING_ENGINE_HARNESS_H_
#define MLA_SCHEDULER_TESTING_ENGINE_HARNESS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/attention_backend.h"
#include "scheduler/clock.h"
#include "scheduler/engine/engine_core.h"

namespace mla::scheduler::testing {

// Records its answer. Owns the tensors it sends and receives.
class TestRequest final : public StreamRequest {
 public:
  void Done(const absl::Status& answer) override {
    ++answers;
    status = answer;
    if (!answer.ok()) detail = DetailOf(answer);
    if (on_done) on_done();
  }
  bool answered() const { return answers > 0; }

  std::function<void()> on_done;
  int answers = 0;
  absl::Status status;
  ErrorDetail detail;  // of an error
  std::vector<kernels::Bf16> kv_rows;
  std::vector<kernels::Bf16> queries;
  std::vector<float> output;
  std::vector<float> lse;
};

// A KV row or query with the values that remain after rounding to bf16.
using Row = std::vector<float>;
// Returns a deterministic pseudo-random row of `dim` elements; distinct keys give distinct rows.
Row MakeRow(uint64_t key, int dim);

// Returns `count` KV rows of TinyModel; distinct keys give distinct rows.
std::vector<Row> Rows(int count, uint64_t key);
// Returns pointers to all rows of `a`, then of `b`, as EngineHarness::Error takes them.
std::vector<const Row*> Pointers(const std::vector<Row>& a, const std::vector<Row>& b = {});

// Computes softmax(scale · q K^T) V over the given rows, dense, in double.
void DenseAttention(const ModelSpec& model, const std::vector<const Row*>& rows, const Row& q,
                    Row* output, double* lse);

struct HarnessOptions {
  Limits limits;
  ModelSpec model;
  std::unique_ptr<kernels::AttentionBackend> backend;  // null: reference
  EngineObserver* observer = nullptr;
  TenantTableOptions tenants = {};
  std::string tier_path = {};
};

// Returns limits small enough that a test meets each of them.
Limits TinyLimits();
// Returns a model with 2 heads, latent 8 + rope 4, nope 6, v 5, 2 layers, and pages of 3 rows.
ModelSpec TinyModel();

class EngineHarness {
 public:
  explicit EngineHarness(HarnessOptions options);
  explicit EngineHarness() : EngineHarness({TinyLimits(), TinyModel(), nullptr, nullptr}) {}

  EngineCore& core() { return *core_; }
  SimulatedClock& clock() { return clock_; }
  const ModelSpec& model() const { return model_; }
  const std::string& tenant() const { return tenant_; }

  SequenceInfo Open(const std::string& request_id = "", int64_t lease_ms = 0);
  SequenceInfo Get(SequenceId id);
  // These submit a request; it may still be waiting when they return.
  std::unique_ptr<TestRequest> Begin(StreamId stream, StepId step,
                                     std::vector<StepSequenceArgs> sequences, int participants = 1);
  // Submits rows [row_begin, row_begin + kv.size()) of a layer with all heads. The query of a row
  // and head is MakeRow(q_key + row * 64 + head).
  std::unique_ptr<TestRequest> Attend(StreamId stream, StepId step, int layer, int row_begin,
                                      const std::vector<Row>& kv, uint64_t q_key);
  // Submits rows of a slice of heads, with KV rows if `kv` is not empty; queries as in Attend.
  std::unique_ptr<TestRequest> Slice(StreamId stream, StepId step, int layer, int row_begin,
                                     int rows, const std::vector<Row>& kv, int head, int heads,
                                     uint64_t q_key);
  // Does what Slice does, without KV rows.
  std::unique_ptr<TestRequest> Query(StreamId stream, StepId step, int layer, int row_begin,
                                     int rows, int head, int heads, uint64_t q_key);
  std::unique_ptr<TestRequest> AppendOnly(StreamId stream, StepId step, int layer, int row_begin,
                                          const std::vector<Row>& kv);
  std::unique_ptr<TestRequest> End(StreamId stream, StepId step, std::vector<int32_t> rows = {},
                                   std::vector<TailArgs> tails = {});
  // Makes a tail that is charged to the tenant, each byte of it `value`; null if the tenant's bound
  // does not allow it.
  std::shared_ptr<const Tail> MakeTail(size_t bytes, uint8_t value);
  std::unique_ptr<TestRequest> Abort(StreamId stream, StepId step);
  // Launches until nothing is ready.
  void Run();
  void Advance(int64_t ms) { AdvanceMicros(ms * 1'000); }
  void AdvanceMicros(int64_t us) {
    clock_.Advance(us * 1'000);
    core_->steps().Tick();
  }
  // Makes Slice's request without submitting it, so that the test can change it; Submit then
  // submits it.
  std::unique_ptr<TestRequest> Unsent(StreamId stream, StepId step, int layer, int row_begin,
                                      int rows, const std::vector<Row>& kv, int head, int heads,
                                      uint64_t q_key);
  void Submit(StreamRequest* request);
  // Returns the largest absolute difference between the request's output and the dense answer. Row
  // i of the request sees the first visible[i] of `rows`. Also compares the LSE.
  double Error(const TestRequest& request, const std::vector<const Row*>& rows,
               const std::vector<int>& visible, uint64_t q_key);

 private:
  void FillQueries(TestRequest* request, uint64_t q_key);

  const std::string tenant_ = "tenant-a";
  SimulatedClock clock_;
  ModelSpec model_;
  std::unique_ptr<EngineCore> core_;
};

}  // namespace mla::scheduler::testing

#endif  // MLA_SCHEDULER_TESTING_ENGINE_HARNESS_H_
