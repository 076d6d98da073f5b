// Whole steps over a command ring allocate nothing in the server once its buffers have grown, and
// its memory stays in place. Server and client share this process, so the count covers both; the
// client writes only entries and prepared messages.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>

#include "client/cpp/shared_memory/shared_memory.h"
#include "kernels/testing/allocation_counter.h"
#include "mla/v1/attention.pb.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "server/logging/logging.h"
#include "server/metrics/metrics.h"
#include "server/shared_memory/shared_memory_listener.h"
#include "tests/bench/wire/null_backend.h"

namespace mla::bench {
namespace {

constexpr uint32_t kLayers = 2;

int64_t ResidentPages() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident;
}

class RingAllocationTest : public testing::Test {
 protected:
  RingAllocationTest() {
    server::ConfigureLogging("text", "error");
    scheduler::EngineOptions options;
    options.observer = &metrics_;
    engine_ = *scheduler::Engine::Create(options, std::make_unique<NullBackend>(), &clock_);
    scheduler::ModelSpec spec;
    spec.id = "m";
    spec.geometry = {4, 32, 8, 0, 0};
    spec.layers = kLayers;
    spec.softmax_scale = 0.1F;
    spec.page_size = 4096;  // the sequence stays within one page group, because growing is not a
                            // steady state
    EXPECT_TRUE(engine_->RegisterModel("default", spec).ok());
    scheduler::OpenArgs open;
    open.tenant = "default";
    open.model_id = "m";
    open.lease_ms = 3'000'000;
    sequence_ = *engine_->OpenSequence(open);
    char name[] = "/tmp/mla-ring-XXXXXX";
    folder_ = mkdtemp(name);
    server::SharedMemoryListenerOptions listener;
    listener.engine = engine_.get();
    listener.regions = &regions_;
    listener.metrics = &metrics_;
    listener.pool = std::make_shared<server::AttendMessagePool>(
        *engine_->AllocateHost(size_t{1} << 20), engine_->tenants());
    listener.path = folder_ + "/shm";
    listener_ = *server::SharedMemoryListener::Open(std::move(listener));
    client::SharedMemoryOptions memory;
    memory.bytes = 1 << 20;
    ring_ = *client::SharedMemory::Connect(folder_ + "/shm", memory);
    block_ = ring_->Allocate(8192);
  }

  ~RingAllocationTest() override {
    ring_.reset();
    listener_.reset();
    rmdir(folder_.c_str());
  }

  // Returns the kind of the completion, or 0 if there was none.
  int Do(const wire::SubmissionEntry& entry) {
    wire::CompletionEntry done{};
    if (!ring_->Submit(entry) || !ring_->Wait(&done, std::chrono::seconds(10)).ok()) return 0;
    return done.kind;
  }

  int Message(const v1::AttendStreamRequest& request) {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryMessage;
    entry.row_count = static_cast<uint32_t>(request.ByteSizeLong());
    entry.in_offset = ring_->OffsetOf(block_.data());
    request.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(block_.data()));
    return Do(entry);
  }

  bool Step() {
    begin_.mutable_begin_step()->set_step_id(++step_);
    if (Message(begin_) != wire::kEntryMessage) return false;
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryAttend;
    entry.profile = v1::PROFILE_ABSORBED;
    entry.flags = wire::kEntryHasKv | wire::kEntryWantLse;
    entry.step_id = step_;
    entry.row_count = 1;
    entry.num_heads = 4;
    entry.in_offset = entry.out_offset = ring_->OffsetOf(block_.data());
    for (entry.layer = 0; entry.layer < kLayers; ++entry.layer) {
      if (Do(entry) != wire::kEntryAttend) return false;
    }
    end_.mutable_end_step()->set_step_id(step_);
    v1::StepSequence* rows = begin_.mutable_begin_step()->mutable_sequences(0);
    rows->set_start_position(rows->start_position() + 1);
    return Message(end_) == wire::kEntryMessage;
  }

  void MakeBegin() {
    v1::BeginStep* begin = begin_.mutable_begin_step();
    begin->set_model_id("m");
    v1::StepSequence* rows = begin->add_sequences();
    rows->set_sequence_id(sequence_.id);
    rows->set_epoch(sequence_.epoch);
    rows->set_rows(1);
  }

  server::Metrics metrics_;
  scheduler::RealClock clock_;
  std::unique_ptr<scheduler::Engine> engine_;
  server::SharedRegionTable regions_{{1 << 20, 4 << 20, 4, 4}, {}};
  std::string folder_;
  std::unique_ptr<server::SharedMemoryListener> listener_;
  std::unique_ptr<client::SharedMemory> ring_;
  std::span<std::byte> block_;
  scheduler::SequenceInfo sequence_;
  v1::AttendStreamRequest begin_, end_;
  uint64_t step_ = 0;
};

TEST_F(RingAllocationTest, TheSteadyStateAllocatesNothing) {
  MakeBegin();
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(Step()) << i;
  [[maybe_unused]] const int64_t resident = ResidentPages();
  const int64_t before = kernels::testing::Allocations();
  for (int i = 0; i < 3000; ++i) ASSERT_TRUE(Step()) << i;
  EXPECT_EQ(kernels::testing::Allocations() - before, 0);
#ifndef MLA_SANITIZED  // whose own bookkeeping grows with every event
  EXPECT_LE(ResidentPages() - resident, 16);
#endif
}

}  // namespace
}  // namespace mla::bench
