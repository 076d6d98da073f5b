// Launches of a device that their submitter awaits while it is idle (EngineOptions::awaited_work).
#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/engine.h"
#include "scheduler/testing/engine_harness.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::scheduler {
namespace {

constexpr std::chrono::seconds kTimeout{20};
constexpr int32_t kRows = 8;

class OneRequest final : public StreamRequest {
 public:
  void Done(const absl::Status& answer) override {
    status = answer;
    thread = std::this_thread::get_id();
    answered_.set_value();
  }
  bool answered() const {
    return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  bool Wait() const { return future_.wait_for(kTimeout) == std::future_status::ready; }

  absl::Status status;
  std::thread::id thread;  // the thread that delivered the answer

 private:
  std::promise<void> answered_;
  std::future<void> future_ = answered_.get_future();
};

// Asked whether it is idle, it answers as `is_idle` does.
class AskedSubmitter final : public Submitter {
 public:
  explicit AskedSubmitter(std::function<bool()> is_idle) : is_idle_(std::move(is_idle)) {}
  bool IsIdle() const override { return is_idle_(); }

 private:
  const std::function<bool()> is_idle_;
};

class IdleSubmitterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    EngineOptions options;
    options.limits = testing::TinyLimits();
    options.inline_work = 1;  // less than any attend of two heads needs
    auto backend =
        std::make_unique<testing::FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
    backend_ = backend.get();
    backend_->SetTwoSlots();
    auto engine = Engine::Create(options, std::move(backend), &clock_);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    ASSERT_TRUE(engine_->RegisterModel("t", testing::TinyModel()).ok());
    OpenArgs args;
    args.tenant = "t";
    args.model_id = testing::TinyModel().id;
    const auto sequence = engine_->OpenSequence(args);
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    stream_ = engine_->OpenStream("t");
    OneRequest begin;
    begin.kind = RequestKind::kBeginStep;
    begin.stream = stream_;
    begin.step_id = 1;
    begin.begin.model_id = args.model_id;
    begin.begin.sequences = {{sequence->id, sequence->epoch, 0, kRows}};
    ASSERT_TRUE(engine_->Submit(&begin).ok());
    ASSERT_TRUE(begin.Wait());
    ASSERT_TRUE(begin.status.ok()) << begin.status;
  }
  void TearDown() override {
    backend_->ReleaseLaunches();
    if (engine_ != nullptr) engine_->CloseStream(stream_);
  }

  // Appends the step's next row.
  std::unique_ptr<OneRequest> Append(const Submitter& submitter) {
    auto append = std::make_unique<OneRequest>();
    append->stream = stream_;
    append->step_id = 1;
    append->submitter = &submitter;
    append->attend.profile = Profile::kAppendOnly;
    append->attend.row_begin = rows_++;
    append->attend.row_count = 1;
    append->attend.num_heads = 2;
    append->attend.has_kv = true;
    append->attend.kv = reinterpret_cast<const std::byte*>(kv_.data());
    const absl::Status status = engine_->Submit(append.get());
    EXPECT_TRUE(status.ok()) << status;
    return append;
  }

  // Returns true if Submit returns while the launch is held up, and another thread delivers the
  // answer.
  bool IsLeftToTheEngine(const Submitter& submitter) {
    backend_->HoldLaunches();
    const auto append = Append(submitter);
    const bool unanswered = !append->answered();
    backend_->ReleaseLaunches();
    EXPECT_TRUE(append->Wait());
    EXPECT_TRUE(append->status.ok()) << append->status;
    return unanswered && append->thread != std::this_thread::get_id();
  }

  RealClock clock_;
  testing::FaultyBackend* backend_ = nullptr;  // the engine's
  std::unique_ptr<Engine> engine_;
  StreamId stream_ = 0;
  int32_t rows_ = 0;
  const std::vector<kernels::Bf16> kv_ = std::vector<kernels::Bf16>(12);
};

TEST_F(IdleSubmitterTest, AwaitsItsLaunch) {
  const AskedSubmitter idle([] { return true; });
  bool awaited = false;
  // The engine's thread may be awake yet, and first.
  while (!awaited && rows_ < kRows) {
    const auto append = Append(idle);
    ASSERT_TRUE(append->Wait());
    EXPECT_TRUE(append->status.ok()) << append->status;
    awaited = append->thread == std::this_thread::get_id();
  }
  EXPECT_TRUE(awaited);
}

TEST_F(IdleSubmitterTest, GoesOnWhereItIsNotIdle) {
  EXPECT_TRUE(IsLeftToTheEngine(AskedSubmitter([] { return false; })));
}

TEST_F(IdleSubmitterTest, GoesOnOnceItIsNotIdle) {
  int asked = 0;
  EXPECT_TRUE(IsLeftToTheEngine(AskedSubmitter([&asked] { return ++asked < 1000; })));
}

TEST_F(IdleSubmitterTest, GoesOnWhereOthersCallTheEngine) {
  std::atomic<bool> called{false};
  std::thread other;
  int asked = 0;
  const AskedSubmitter idle([&] {
    if (++asked == 2) {
      other = std::thread([&] { called = engine_->Stats().requests_running <= 1; });
    }
    return true;
  });
  EXPECT_TRUE(IsLeftToTheEngine(idle));
  if (other.joinable()) other.join();
  EXPECT_TRUE(called || asked < 2);
}

}  // namespace
}  // namespace mla::scheduler
