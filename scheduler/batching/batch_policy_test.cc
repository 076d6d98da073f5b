// Tests which requests go into a launch, with a device whose launches take as long as their work
// says. Times come from a simulated clock, so every bound here is exact.
#include <algorithm>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "scheduler/batching/batch_policy.h"
#include "scheduler/kvcache/kv_cache.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kMilli = 1'000'000;

class PlainRequest final : public StreamRequest {
 public:
  void Done(const absl::Status&) override {}
};

// One stream that sends Attends of one step at one layer, one after the other.
struct Worker {
  std::unique_ptr<Step> step;
  std::unique_ptr<Sequence> sequence;
  int32_t message_rows = 1;
  bool again = true;  // sends the next when one is answered
  std::unique_ptr<PlainRequest> request;
  bool waits = false;
  int64_t answered = 0;
  std::vector<int64_t> waited_ns;  // one for each answered request
};

class BatchPolicyTest : public ::testing::Test {
 protected:
  BatchPolicyTest() : pool_(1 << 20, 0), work_(&pool_) {
    model_ = MakeModel(128);
    limits_.slice_wait_us = 0;
    policy_ = std::make_unique<BatchPolicy>(limits_, int64_t{1} << 40);
  }

  static std::unique_ptr<Model> MakeModel(int32_t heads) {
    auto spec = std::make_shared<ModelSpec>();
    spec->id = "m";
    spec->geometry = {heads, 512, 64, 128, 128};
    spec->layers = 1;
    auto model = std::make_unique<Model>();
    model->spec = spec;
    model->contents->layout =
        kvcache::MakeLayout({.row_bytes = 1152, .page_size = 64, .layers = 1});
    model->tile_rows = 128;
    model->expanded_min_rows = model->expanded_min_rows_f32 = 1 << 30;
    return model;
  }

  // Requests of the tenant that were answered.
  int64_t Served(TenantKey tenant) const {
    int64_t count = 0;
    for (const auto& worker : workers_) {
      if (worker->step->tenant == tenant) count += worker->answered;
    }
    return count;
  }

  // A worker of the tenant whose sequence has `cached` rows and gets `rows` more in messages of
  // `message_rows`.
  Worker* Add(TenantKey tenant, int32_t cached, int32_t rows, int32_t message_rows,
              kernels::DType q_dtype = kernels::DType::kBf16) {
    workers_.push_back(std::make_unique<Worker>());
    Worker& worker = *workers_.back();
    worker.sequence = std::make_unique<Sequence>();
    worker.step = std::make_unique<Step>();
    Step& step = *worker.step;
    step.id = workers_.size();
    step.tenant = tenant;
    step.model = model_.get();
    step.total_rows = rows;
    step.entries.push_back({worker.sequence.get(), cached, rows, 0});
    step.layers.resize(1);
    step.pages_ready = true;
    worker.message_rows = message_rows;
    worker.request = std::make_unique<PlainRequest>();
    worker.request->attend.q_dtype = q_dtype;
    Send(worker);
    return &worker;
  }

  void Send(Worker& worker) {
    Step& step = *worker.step;
    LayerProgress& layer = step.layers[0];
    if (layer.accepted == step.total_rows) layer = LayerProgress();  // the next step
    StreamRequest& request = *worker.request;
    AttendArgs& args = request.attend;
    args.row_begin = layer.accepted;
    args.row_count = std::min(worker.message_rows, step.total_rows - layer.accepted);
    args.num_heads = step.model->spec->geometry.num_heads;
    args.profile = Profile::kAbsorbed;
    args.has_kv = true;
    layer.accepted += args.row_count;
    request.engine = StreamRequest::EngineFields();
    request.engine.Begin(now_, /*was_handed_back=*/false);
    request.engine.step = &step;
    request.engine.blocked_since_ns = now_;
    request.engine.deadline_ns = now_ + 30'000 * kMilli;
    worker.waits = true;
    waiting_.Add(&request, 1);
  }

  Worker& Of(const StreamRequest* request) {
    for (const auto& worker : workers_) {
      if (worker->request.get() == request) return *worker;
    }
    std::abort();
  }

  // Chooses, runs and completes one launch. The device takes `nanos_per_unit_` for each unit.
  void Launch() {
    policy_->Choose(waiting_, work_, now_, batch_);
    ASSERT_FALSE(batch_.empty());
    const auto took = static_cast<int64_t>(20'000 + nanos_per_unit_ * double(batch_.units.sum()));
    longest_ns_ = std::max(longest_ns_, took);
    now_ += took;
    policy_->Observe(batch_, took);
    for (StreamRequest* request : batch_.requests) {
      const int32_t rows = std::exchange(request->engine.rows_launched, 0);
      request->engine.rows_done += rows;
      Worker& worker = Of(request);
      worker.step->layers[0].stored += rows;
      if (request->engine.rows_done < request->attend.row_count) {
        request->engine.blocked_since_ns = now_;
        waiting_.Return(request, 1);
        continue;
      }
      worker.waits = false;
      ++worker.answered;
      worker.waited_ns.push_back(now_ - request->engine.arrival_ns);
      if (worker.again) Send(worker);
    }
  }

  void Launches(int count) {
    for (int i = 0; i < count; ++i) Launch();
  }

  // Launches until the worker has been answered one more time.
  int LaunchesUntil(const Worker& worker) {
    const int64_t before = worker.answered;
    int launches = 0;
    while (worker.answered == before && launches < 10'000) {
      Launch();
      ++launches;
    }
    return launches;
  }

  Limits limits_;
  std::unique_ptr<Model> model_;
  kvcache::SlabPool pool_;
  kvcache::PageWorkQueue work_;
  WaitingRequests waiting_;
  std::unique_ptr<BatchPolicy> policy_;
  Batch batch_;
  std::vector<std::unique_ptr<Worker>> workers_;
  MonotonicNanos now_ = 1;
  double nanos_per_unit_ = 1.6;  // measured on one core
  int64_t longest_ns_ = 0;
};

TEST_F(BatchPolicyTest, LaunchesKeepTheirTimeOnFastAndSlowDevices) {
  for (const double rate : {1.6, 0.0001}) {
    nanos_per_unit_ = rate;
    for (int i = 0; i < 4; ++i) Add(1 + static_cast<TenantKey>(i), 16'000, 4'000, 1'000);
    Launches(50);  // the rates are learned
    longest_ns_ = 0;
    Launches(200);
    // One row of 128 heads at this context takes longer than a launch should on the slow device.
    const int64_t one_row = static_cast<int64_t>(rate * 1152 * 20'000);
    EXPECT_LE(longest_ns_, std::max(limits_.launch_ms * kMilli, one_row + kMilli)) << rate;
  }
}

// Rows that two launches merge round otherwise than rows of one launch.
TEST_F(BatchPolicyTest, FirstLaunchOfAFastDeviceTakesAWholeStep) {
  constexpr int32_t kRows = 32;
  const auto rows_of_first_launch = [this](double nanos_per_kv_byte) {
    policy_->ExpectRate(nanos_per_kv_byte);
    waiting_ = WaitingRequests();
    Add(1, 16'000, kRows, kRows);
    policy_->Choose(waiting_, work_, now_, batch_);
    return batch_.requests.empty() ? 0 : batch_.requests[0]->engine.rows_launched;
  };
  EXPECT_EQ(rows_of_first_launch(1e-3), kRows);
  EXPECT_LT(rows_of_first_launch(kernels::kCoreNanosPerKvByte), kRows);
}

TEST_F(BatchPolicyTest, AnotherKeyGetsItsTurnBesideAFlood) {
  // More messages under way than a launch takes, so that each one cuts a message.
  for (int i = 0; i < 24; ++i) Add(1 + static_cast<TenantKey>(i % 3), 0, 4'000, 100);
  Launches(20);
  Worker* light = Add(9, 100, 1, 1, kernels::DType::kF32);
  EXPECT_LE(LaunchesUntil(*light), 2);
  // The other way round: bf16 against a flood of fp32 decodes.
  workers_.clear();
  waiting_ = WaitingRequests();
  for (int i = 0; i < 64; ++i) Add(1, 2'000, 1, 1, kernels::DType::kF32);
  Launches(20);
  light = Add(9, 100, 1, 1);
  EXPECT_LE(LaunchesUntil(*light), 2);
}

TEST_F(BatchPolicyTest, AnotherKeyOfTheSameTenantGetsItsTurn) {
  for (int i = 0; i < 24; ++i) Add(1, 0, 4'000, 100);
  Launches(20);
  Worker* light = Add(1, 100, 1, 1, kernels::DType::kF32);
  EXPECT_LE(LaunchesUntil(*light), 4);
}

TEST_F(BatchPolicyTest, FirstPromptsGoBesideLongExtends) {
  for (int i = 0; i < 4; ++i) Add(1, 16'000, 4'000, 1'000);
  Launches(30);
  Worker* prompt = Add(2, 0, 4, 4);
  EXPECT_LE(LaunchesUntil(*prompt), 2);
}

TEST_F(BatchPolicyTest, DecodeGoesBesideLongPrompts) {
  for (TenantKey tenant = 1; tenant <= 4; ++tenant) Add(tenant, 0, 8'000, 1'000);
  Launches(30);
  Worker* decode = Add(9, 1'000, 1, 1);
  Launches(200);
  for (const int64_t waited : decode->waited_ns) {
    EXPECT_LE(waited, 3 * limits_.launch_ms * kMilli) << "a launch that runs, and its own";
  }
  EXPECT_GT(decode->answered, 50);
}

TEST_F(BatchPolicyTest, LaunchesAreHalfAsLongWhileDecodesCome) {
  for (TenantKey tenant = 1; tenant <= 4; ++tenant) Add(tenant, 0, 8'000, 1'000);
  const int64_t whole = limits_.launch_ms * kMilli;
  const auto longest_of = [this](int launches) {
    longest_ns_ = 0;
    Launches(launches);
    return longest_ns_;
  };
  Launches(50);  // the rates are learned
  EXPECT_GT(longest_of(50), whole * 3 / 4);
  Worker* decode = Add(9, 1'000, 1, 1);
  Launches(2);
  EXPECT_LE(longest_of(50), whole / 2 + kMilli);
  decode->again = false;
  Launches(50);
  EXPECT_GT(longest_of(50), whole * 3 / 4) << "no decodes, long launches";
}

TEST_F(BatchPolicyTest, DecodeGoesBesideAgedRowsOfWhichOneFillsALaunch) {
  // Long contexts on a slow device, and more requests than are served while they are young.
  for (int i = 0; i < 40; ++i) Add(1, 16'000, 40, 40);
  Launches(400);
  Worker* decode = Add(9, 100, 1, 1);
  EXPECT_LE(LaunchesUntil(*decode), 2);
  EXPECT_LE(LaunchesUntil(*decode), 2);
}

TEST_F(BatchPolicyTest, PromptsOfATenantGoOnBesideItsOwnDecodes) {
  for (int i = 0; i < 200; ++i) Add(1, 200, 1, 1);
  Launches(20);
  Worker* prompt = Add(1, 500, 20, 20);
  EXPECT_LE(LaunchesUntil(*prompt), 20);
}

TEST_F(BatchPolicyTest, PromptWhoseRowsAreLargerThanTheShareOfALaunchGoesOnBesideDecodes) {
  // One row takes most of a launch, so it never fits after the decodes.
  for (int i = 0; i < 200; ++i) Add(1, 500, 1, 1);
  Launches(20);
  Worker* prompt = Add(1, 5'000, 20, 20);
  EXPECT_LE(LaunchesUntil(*prompt), 400);
}

TEST_F(BatchPolicyTest, TenantsShareByWhatTheyAreServed) {
  Worker* small = Add(1, 1'000, 1, 1);
  for (int i = 0; i < 40; ++i) Add(2, 1'000, 1, 1);
  Launches(100);
  int64_t large = 0;
  for (const auto& worker : workers_) {
    if (worker.get() != small) large = std::max(large, worker->answered);
  }
  // Alone in its tenant, it goes with every launch.
  EXPECT_GE(small->answered, 95);
  EXPECT_LT(large, small->answered);
}

TEST_F(BatchPolicyTest, TimeThatATenantIsChargedIsTakenFromItsService) {
  for (int i = 0; i < 8; ++i) {
    Add(1, 4'000, 1, 1);
    Add(2, 4'000, 1, 1);
  }
  Launches(100);
  const int64_t of_request = batch_.units.sum() / static_cast<int64_t>(batch_.requests.size());
  const int64_t units = policy_->UnitsOf(batch_, 1'000 * kMilli);
  EXPECT_NEAR(static_cast<double>(units) * nanos_per_unit_, 1'000.0 * kMilli, 50.0 * kMilli);
  waiting_.Charge(1, 1, units);
  const int64_t one = Served(1), two = Served(2);
  Launches(500);
  const auto ahead = static_cast<double>((Served(2) - two) - (Served(1) - one));
  EXPECT_NEAR(ahead, static_cast<double>(units / of_request), 16);
}

TEST_F(BatchPolicyTest, TimeSpentIdleIsNotSavedUp) {
  Worker* sleeper = Add(1, 1'000, 1, 1);
  sleeper->again = false;
  for (int i = 0; i < 8; ++i) Add(2, 4'000, 1, 1);
  Launches(500);
  ASSERT_EQ(sleeper->answered, 1);
  // Many requests at the same time: the other tenant still gets about half of the launched work.
  for (int i = 0; i < 200; ++i) Add(1, 4'000, 1, 1);
  const int64_t one = Served(1), two = Served(2);
  Launches(300);
  EXPECT_NEAR(static_cast<double>(Served(1) - one) / static_cast<double>(Served(2) - two), 1, 0.2);
}

TEST_F(BatchPolicyTest, TimeSpentWaitingForRowsIsNotSavedUp) {
  // Tenant 1 has a request that waits for KV rows; its key differs from the key of later requests.
  Worker* blocked = Add(1, 1'000, 1, 1, kernels::DType::kF32);
  blocked->request->attend.has_kv = false;
  blocked->step->layers[0].accepted = 0;
  ASSERT_FALSE(BatchPolicy::Ready(*blocked->request));
  for (int i = 0; i < 8; ++i) Add(2, 4'000, 1, 1);
  Launches(500);
  ASSERT_EQ(blocked->answered, 0);
  for (int i = 0; i < 200; ++i) Add(1, 4'000, 1, 1);
  const int64_t one = Served(1), two = Served(2);
  Launches(300);
  EXPECT_NEAR(static_cast<double>(Served(1) - one) / static_cast<double>(Served(2) - two), 1, 0.2);
  // The queue of the blocked request has not saved up any service within its tenant either.
  blocked->request->attend.has_kv = true;
  for (int i = 0; i < 8; ++i) Add(1, 4'000, 1, 1, kernels::DType::kF32);
  const auto of_key = [this](kernels::DType dtype) {
    int64_t count = 0;
    for (const auto& worker : workers_) {
      if (worker->step->tenant == 1 && worker->request->attend.q_dtype == dtype) {
        count += worker->answered;
      }
    }
    return count;
  };
  const int64_t wide = of_key(kernels::DType::kF32), narrow = of_key(kernels::DType::kBf16);
  Launches(300);
  EXPECT_NEAR(static_cast<double>(of_key(kernels::DType::kF32) - wide) /
                  static_cast<double>(of_key(kernels::DType::kBf16) - narrow),
              1, 0.3);
}

TEST_F(BatchPolicyTest, PageWorkThatIsMoreThanALaunchGoesAhead) {
  // Two groups of a former tenant, each more than a launch may zero.
  const kvcache::GroupLayout kLayout =
      kvcache::MakeLayout({.row_bytes = 1152, .page_size = 64, .layers = 1000});
  kvcache::SlabPool pool(4 * kLayout.group_bytes(), 0);
  kvcache::PageWorkQueue work(&pool);
  const kvcache::LayoutId layout = pool.AddLayout(kLayout).value();
  for (int i = 0; i < 3; ++i) {
    work.AddZeroing(1, pool.Take(layout, 1).entry, kLayout.group_bytes());
  }
  Worker* worker = Add(1, 100, 1, 1);
  worker->step->pages_ready = false;
  worker->step->ticket = work.last();
  Worker* other = Add(2, 100, 1, 1);
  int launches = 0;
  for (; !worker->step->pages_ready; ++launches) {
    ASSERT_LT(launches, 4);
    policy_->Choose(waiting_, work, now_, batch_);
    ASSERT_LE(batch_.pages.ranges().size(), 1u) << launches;
    EXPECT_NE(batch_.pages.empty(), batch_.requests.empty()) << "each takes a whole launch";
    work.Acknowledge(&batch_.pages);
    // The other tenant has been served less once a group is done.
    EXPECT_EQ(other->request->engine.state == RequestState::kTaken, launches >= 1);
  }
  EXPECT_EQ(launches, 4) << "three groups, and the other tenant's row";
}

// Two sequences whose pages are each more than a launch may copy.
TEST_F(BatchPolicyTest, CopiesGoBeforeTheFirstRowsOfTheirLayer) {
  const kvcache::GroupLayout kLayout =
      kvcache::MakeLayout({.row_bytes = 1 << 20, .page_size = 64, .layers = 2});
  kvcache::SlabPool pool(4 * kLayout.group_bytes(), 0);
  kvcache::PageWorkQueue work(&pool);
  const kvcache::LayoutId layout = pool.AddLayout(kLayout).value();
  Worker* worker = Add(1, 127, 1, 2);
  worker->step->entries.push_back({worker->sequence.get(), 127, 1, 1});
  worker->request->attend.row_count = worker->step->total_rows = 2;
  worker->step->copies = true;
  for (StepEntry& entry : worker->step->entries) {
    const uint32_t source = pool.Take(layout, 1).entry;
    entry.copied.by_list[0] = pool.Take(layout, 1).entry;
    work.AddCopy(1, layout, entry.copied.by_list[0], source, 63, /*whole=*/false);
  }
  for (const size_t requests : {0u, 0u, 1u}) {
    policy_->Choose(waiting_, work, now_, batch_);
    EXPECT_EQ(batch_.requests.size(), requests);
    EXPECT_EQ(batch_.pages.bytes(), requests == 0 ? int64_t{63} << 20 : 0);
    work.Acknowledge(&batch_.pages);
  }
  EXPECT_EQ(worker->step->layers[0].appended, 2);
  EXPECT_EQ(work.copies_open(), 2) << "until the step ends";
  EXPECT_EQ(work.queued(), 0);
}

// Failing one request may remove others before and after it.
TEST_F(BatchPolicyTest, PassesGoOnWhereRequestsAreRemoved) {
  for (int i = 0; i < 5; ++i) Add(1, 0, 4, 1);
  const auto request = [&](size_t i) -> StreamRequest* { return workers_[i]->request.get(); };
  std::vector<const StreamRequest*> seen;
  waiting_.StartPass();
  while (StreamRequest* const next = waiting_.NextInPass()) {
    seen.push_back(next);
    if (next != request(1)) continue;
    for (const size_t i : {1, 0, 2}) waiting_.Remove(request(i));
  }
  EXPECT_EQ(seen,
            (std::vector<const StreamRequest*>{request(0), request(1), request(3), request(4)}));
  waiting_.Remove(request(4));
  waiting_.StartPass();
  EXPECT_EQ(waiting_.NextInPass(), request(3));
  EXPECT_EQ(waiting_.NextInPass(), nullptr);
}

TEST_F(BatchPolicyTest, SteadyQueuesAreForgotten) {
  for (TenantKey tenant = 1; tenant < 500; ++tenant) {
    Worker* once = Add(tenant, 100, 1, 1);
    once->again = false;
    Launch();
  }
  waiting_.Prune();
  EXPECT_TRUE(waiting_.shares().empty());
}

}  // namespace
}  // namespace mla::scheduler
