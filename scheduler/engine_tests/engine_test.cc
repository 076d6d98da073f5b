// The engine with its threads: many submitting threads, control calls in between, streams that come
// and go.
#include "scheduler/engine.h"
#include "base/error.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::scheduler {
namespace {

using testing::DenseAttention;
using testing::MakeRow;
using testing::Row;

#if defined(MLA_SANITIZED)
constexpr int kSteps = 40;
#else
constexpr int kSteps = 300;
#endif

class BlockingRequest final : public StreamRequest {
 public:
  void Done(const absl::Status& answer) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    status = answer;
    done_ = true;
    ready_.notify_one();
  }
  absl::Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    ready_.wait(lock, [this] { return done_; });
    done_ = false;
    return status;
  }
  absl::Status status;

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  bool done_ = false;
};

// One worker: decodes a sequence of its own and checks every output.
class Worker {
 public:
  Worker(Engine& engine, const ModelSpec& model, uint64_t id)
      : engine_(engine), model_(model), id_(id), stream_(engine.OpenStream("t")) {
    OpenArgs args;
    args.tenant = "t";
    args.model_id = model.id;
    sequence_ = engine.OpenSequence(args)->id;
  }
  ~Worker() { engine_.CloseStream(stream_); }

  std::string Decode(int steps) {
    for (int step = 0; step < steps; ++step) {
      if (std::string wrong = Step(step); !wrong.empty()) return wrong;
    }
    return "";
  }

 private:
  absl::Status Send(BlockingRequest& request) {
    request.stream = stream_;
    request.step_id = id_;
    absl::Status status = engine_.Submit(&request);
    return status.ok() ? request.Wait() : status;
  }

  std::string Step(int step) {
    begin_.kind = RequestKind::kBeginStep;
    begin_.begin.model_id = model_.id;
    begin_.begin.sequences = {{sequence_, epoch_, length_, 1}};
    if (absl::Status s = Send(begin_); !s.ok()) return s.ToString();
    for (int layer = 0; layer < model_.layers; ++layer) {
      const uint64_t key = id_ * 1'000'000 + uint64_t(step) * 8 + layer;
      rows_[layer].push_back(MakeRow(key, 12));
      const Row query = MakeRow(key + 4, 12);
      if (std::string wrong = Attend(layer, query); !wrong.empty()) return wrong;
    }
    end_.kind = RequestKind::kEndStep;
    if (absl::Status s = Send(end_); !s.ok()) return s.ToString();
    if (++length_ == 30) {  // start over, which also moves the epoch
      auto cut = engine_.TruncateSequence("t", sequence_, 3, epoch_);
      if (!cut.ok()) return cut.status().ToString();
      epoch_ = cut->epoch;
      length_ = 3;
      for (auto& rows : rows_) rows.resize(3);
    }
    return "";
  }

  std::string Attend(int layer, const Row& query) {
    std::vector<kernels::Bf16> kv, q;
    for (const float v : rows_[layer].back()) kv.push_back(kernels::ToBf16(v));
    for (int head = 0; head < 2; ++head) {
      for (const float v : query) q.push_back(kernels::ToBf16(v));
    }
    std::vector<float> o(16, -9.0f);
    AttendArgs& args = attend_.attend;
    args.layer = layer;
    args.row_count = 1;
    args.num_heads = 2;
    args.has_kv = true;
    args.o_dtype = kernels::DType::kF32;
    args.kv = reinterpret_cast<const std::byte*>(kv.data());
    args.q = reinterpret_cast<const std::byte*>(q.data());
    args.o = reinterpret_cast<std::byte*>(o.data());
    if (absl::Status s = Send(attend_); !s.ok()) return s.ToString();
    std::vector<const Row*> seen;
    for (const Row& row : rows_[layer]) seen.push_back(&row);
    Row want;
    double lse = 0;
    DenseAttention(model_, seen, query, &want, &lse);
    for (int i = 0; i < 16; ++i) {
      if (!(std::abs(o[i] - want[i % 8]) < 1e-4)) return "an output is wrong";
    }
    return "";
  }

  Engine& engine_;
  const ModelSpec model_;
  const uint64_t id_;
  const StreamId stream_;
  SequenceId sequence_ = 0;
  uint64_t epoch_ = 1;
  int64_t length_ = 0;
  std::vector<Row> rows_[2];
  BlockingRequest begin_, attend_, end_;
};

class EngineTest : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    EngineOptions options;
    options.limits = testing::TinyLimits();
    options.inline_work = GetParam();
    auto engine = Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), &clock_);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    auto model = engine_->RegisterModel("t", testing::TinyModel());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = model->spec;
  }

  RealClock clock_;
  std::unique_ptr<Engine> engine_;
  ModelSpec model_;
};

TEST_P(EngineTest, WorkersShareTheEngineAndGetTheirOwnAnswers) {
  std::atomic<bool> stop{false};
  std::thread control([&] {
    while (!stop) {
      engine_->Stats();
      engine_->ListModels("t");
      std::vector<SequenceId> absent;
      engine_->RenewLeases({"t", {}, ""}, 0, &absent);
      const StreamId brief = engine_->OpenStream("t");
      engine_->CloseStream(brief);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::vector<std::thread> threads;
  std::vector<std::string> wrong(4);
  for (uint64_t id = 1; id <= 4; ++id) {
    threads.emplace_back([&, id] {
      Worker worker(*engine_, model_, id);
      wrong[id - 1] = worker.Decode(kSteps);
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  control.join();
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.requests_failed, 0u);
  EXPECT_EQ(stats.open_steps, 0);
  EXPECT_EQ(stats.streams, 0);
  EXPECT_EQ(stats.rows_decode + stats.rows_extend + stats.rows_prefill, uint64_t{4} * kSteps * 2);
}

TEST_P(EngineTest, TimersFireWithoutTraffic) {
  EngineOptions options;
  options.limits = testing::TinyLimits();
  options.limits.sequence_lease_ms = 30;
  options.limits.kv_wait_ms = 30;
  options.inline_work = GetParam();
  auto engine = *Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), &clock_);
  ASSERT_TRUE(engine->RegisterModel("t", testing::TinyModel()).ok());
  OpenArgs args;
  args.tenant = "t";
  args.model_id = model_.id;
  const SequenceInfo waits = *engine->OpenSequence(args);
  const StreamId stream = engine->OpenStream("t");
  BlockingRequest begin;
  begin.kind = RequestKind::kBeginStep;
  begin.stream = stream;
  begin.step_id = 1;
  begin.begin.model_id = model_.id;
  begin.begin.sequences = {{waits.id, 1, 0, 1}};
  ASSERT_TRUE(engine->Submit(&begin).ok());
  ASSERT_TRUE(begin.Wait().ok());
  BlockingRequest query;  // its KV row never comes
  query.stream = stream;
  query.step_id = 1;
  query.attend.row_count = 1;
  query.attend.num_heads = 2;
  std::vector<kernels::Bf16> q(24);
  std::vector<kernels::Bf16> o(16);
  query.attend.q = reinterpret_cast<const std::byte*>(q.data());
  query.attend.o = reinterpret_cast<std::byte*>(o.data());
  ASSERT_TRUE(engine->Submit(&query).ok());
  EXPECT_EQ(query.Wait().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(query.status).reason, "kv_rows_missing");
  engine->CloseStream(stream);
  for (int i = 0; i < 500 && engine->Stats().leases_expired == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(engine->Stats().sequences, 0);
}

TEST_P(EngineTest, TheQueueIsBounded) {
  EngineOptions options;
  options.limits = testing::TinyLimits();
  options.limits.queue_requests = 3;
  options.dedicated_thread = false;
  auto engine = *Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), &clock_);
  const StreamId stream = engine->OpenStream("t");
  BlockingRequest requests[4];
  for (int i = 0; i < 4; ++i) {
    requests[i].kind = RequestKind::kAbortStep;
    requests[i].stream = stream;
    const absl::Status status = engine->Submit(&requests[i]);
    EXPECT_EQ(status.code(), i < 3 ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted);
  }
  while (engine->Poll()) {
  }
  EXPECT_EQ(requests[2].Wait().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(engine->Submit(&requests[3]).ok());
  while (engine->Poll()) {
  }
  EXPECT_EQ(requests[3].Wait().code(), absl::StatusCode::kNotFound);
}

// A request whose answer runs a function; an AbortStep of an unknown step is answered at once.
class CallbackRequest final : public StreamRequest {
 public:
  explicit CallbackRequest(StreamId of, std::function<void()> function = {})
      : function_(std::move(function)) {
    kind = RequestKind::kAbortStep;
    stream = of;
    step_id = 404;
  }
  void Done(const absl::Status& status) override {
    code = status.code();
    reason = DetailOf(status).reason;
    function_();
  }
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string reason;

 private:
  const std::function<void()> function_;
};

// Holds Done up until Release, at most for ten seconds.
class Gate {
 public:
  ~Gate() { Release(); }
  void Pass() {
    thread_ = std::this_thread::get_id();
    entered_.set_value();
    released_in_time_ = release_.get_future().wait_for(kTimeout) == std::future_status::ready;
  }
  bool WaitUntilEntered() {
    return entered_.get_future().wait_for(kTimeout) == std::future_status::ready;
  }
  void Release() {
    if (!std::exchange(released_, true)) release_.set_value();
  }
  bool released_in_time() const { return released_in_time_; }
  // The thread in Pass, once WaitUntilEntered has returned.
  std::thread::id thread() const { return thread_; }

 private:
  static constexpr std::chrono::seconds kTimeout{10};
  std::promise<void> entered_, release_;
  std::thread::id thread_;
  bool released_ = false;
  std::atomic<bool> released_in_time_{false};
};

// A transport that is slow to take an answer does not delay control calls. It delays a launch only
// if the engine's own thread has to run the launch and delivers that answer.
TEST_P(EngineTest, AnswersAreDeliveredWithoutTheRole) {
  Gate gate;
  const StreamId stream = engine_->OpenStream("t");
  CallbackRequest slow(stream, [&gate] { gate.Pass(); });
  std::thread submitter([&] { EXPECT_TRUE(engine_->Submit(&slow).ok()); });
  ASSERT_TRUE(gate.WaitUntilEntered());
  OpenArgs args;
  args.tenant = "t";
  args.model_id = model_.id;
  const SequenceInfo sequence = *engine_->OpenSequence(args);
  // Also with inline work, where the engine's thread happened to hold the role.
  if (gate.thread() != submitter.get_id()) gate.Release();
  // A whole step runs in that time; its answers wait for the slow one.
  const StreamId other = engine_->OpenStream("t");
  const uint64_t launches = engine_->Stats().launches;
  BlockingRequest begin, append;
  begin.kind = RequestKind::kBeginStep;
  begin.stream = append.stream = other;
  begin.step_id = append.step_id = 1;
  begin.begin.model_id = model_.id;
  begin.begin.sequences = {{sequence.id, sequence.epoch, 0, 1}};
  EXPECT_TRUE(engine_->Submit(&begin).ok());
  const std::vector<kernels::Bf16> kv(12);
  append.attend.profile = Profile::kAppendOnly;
  append.attend.row_count = 1;
  append.attend.has_kv = true;
  append.attend.kv = reinterpret_cast<const std::byte*>(kv.data());
  EXPECT_TRUE(engine_->Submit(&append).ok());
  for (int i = 0; i < 2000 && engine_->Stats().launches == launches; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(engine_->Stats().launches, launches + 1);
  gate.Release();
  submitter.join();
  EXPECT_TRUE(begin.Wait().ok());
  EXPECT_TRUE(append.Wait().ok());
  engine_->CloseStream(other);
  engine_->CloseStream(stream);
  EXPECT_TRUE(gate.released_in_time());
  EXPECT_EQ(slow.reason, "step_not_found");
}

TEST_P(EngineTest, AStreamIsClosedOnceItsAnswersAreDelivered) {
  Gate gate;
  std::atomic<bool> delivered{false};
  const StreamId stream = engine_->OpenStream("t");
  CallbackRequest slow(stream, [&] {
    gate.Pass();
    delivered = true;
  });
  std::thread submitter([&] { EXPECT_TRUE(engine_->Submit(&slow).ok()); });
  ASSERT_TRUE(gate.WaitUntilEntered());
  std::atomic<bool> delivered_before_close{false};
  std::thread closer([&] {
    engine_->CloseStream(stream);
    delivered_before_close = delivered.load();
  });
  // Not proof that it waits, but a chance to be wrong.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  gate.Release();
  closer.join();
  submitter.join();
  EXPECT_TRUE(delivered_before_close);
}

TEST_P(EngineTest, AnswersOfAStreamKeepTheirOrder) {
  constexpr int kThreads = 4, kRequests = 2000;
  std::atomic<int> out_of_order{0}, answered{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      const StreamId stream = engine_->OpenStream("t");
      std::vector<std::unique_ptr<CallbackRequest>> requests;
      int next = 0;  // changed by one deliverer of the stream at a time
      for (int i = 0; i < kRequests; ++i) {
        requests.push_back(std::make_unique<CallbackRequest>(stream, [&, i] {
          if (next++ != i) ++out_of_order;
          ++answered;
        }));
        while (!engine_->Submit(requests.back().get()).ok()) std::this_thread::yield();
      }
      engine_->CloseStream(stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(out_of_order, 0);
  EXPECT_EQ(answered, kThreads * kRequests);
}

// Clients that are answered together send their next requests together: the first to arrive gets no
// launch of its own while the others are still being answered.
TEST_P(EngineTest, WhatArrivesDuringADeliverySharesALaunch) {
  constexpr int kAttempts = 5;  // the engine's timer may come in between
  const std::vector<kernels::Bf16> kv(12);
  const StreamId slow_stream = engine_->OpenStream("t");
  BlockingRequest begins[2], appends[2];
  for (int i = 0; i < 2; ++i) {
    OpenArgs args;
    args.tenant = "t";
    args.model_id = model_.id;
    const SequenceInfo sequence = *engine_->OpenSequence(args);
    begins[i].kind = RequestKind::kBeginStep;
    begins[i].stream = appends[i].stream = engine_->OpenStream("t");
    begins[i].step_id = appends[i].step_id = static_cast<StepId>(i) + 1;
    begins[i].begin.model_id = model_.id;
    begins[i].begin.sequences = {{sequence.id, sequence.epoch, 0, kAttempts}};
    ASSERT_TRUE(engine_->Submit(&begins[i]).ok());
    ASSERT_TRUE(begins[i].Wait().ok());
  }
  bool together = false;
  for (int attempt = 0; attempt < kAttempts && !together; ++attempt) {
    Gate gate;
    CallbackRequest slow(slow_stream, [&gate] { gate.Pass(); });
    std::thread submitter([&] { EXPECT_TRUE(engine_->Submit(&slow).ok()); });
    ASSERT_TRUE(gate.WaitUntilEntered());
    const uint64_t launches = engine_->Stats().launches;
    for (BlockingRequest& append : appends) {
      append.attend = AttendArgs();
      append.attend.profile = Profile::kAppendOnly;
      append.attend.row_begin = attempt;
      append.attend.row_count = 1;
      append.attend.has_kv = true;
      append.attend.kv = reinterpret_cast<const std::byte*>(kv.data());
      EXPECT_TRUE(engine_->Submit(&append).ok());
    }
    gate.Release();
    submitter.join();
    for (BlockingRequest& append : appends) EXPECT_TRUE(append.Wait().ok());
    together = engine_->Stats().launches == launches + 1;
  }
  EXPECT_TRUE(together);
  for (const BlockingRequest& begin : begins) engine_->CloseStream(begin.stream);
  engine_->CloseStream(slow_stream);
}

// Every answer submits the next request, as a transport may.
TEST_P(EngineTest, AnswersMaySubmit) {
  constexpr int kRequests = 5000;
  const StreamId stream = engine_->OpenStream("t");
  std::vector<std::unique_ptr<CallbackRequest>> requests;
  std::promise<void> last;
  for (int i = 0; i < kRequests; ++i) {
    requests.push_back(std::make_unique<CallbackRequest>(stream, [&, i] {
      if (i + 1 == kRequests) return last.set_value();
      EXPECT_TRUE(engine_->Submit(requests[static_cast<size_t>(i) + 1].get()).ok());
    }));
  }
  ASSERT_TRUE(engine_->Submit(requests[0].get()).ok());
  EXPECT_EQ(last.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  engine_->CloseStream(stream);
}

INSTANTIATE_TEST_SUITE_P(InlineWork, EngineTest, ::testing::Values(0, 1 << 22));

}  // namespace
}  // namespace mla::scheduler
