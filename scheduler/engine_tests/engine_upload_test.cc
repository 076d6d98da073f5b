// Uploads of weights at the same time as other calls.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/testing/engine_harness.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::scheduler {
namespace {

// Repacking the weights of all heads takes as long as many launches.
TEST(EngineUploadTest, OtherCallsGoBetweenTheHeadsOfAChunk) {
  RealClock clock;
  auto backend =
      std::make_unique<testing::FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
  std::atomic<int> calls{0};
  int between = 0, last = 0;
  backend->OnLoadWeights([&](int32_t head) {
    if (head > 0) between += calls - last;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    last = calls;
  });
  EngineOptions options;
  options.limits = testing::TinyLimits();
  auto engine = Engine::Create(options, std::move(backend), &clock);
  ASSERT_TRUE(engine.ok()) << engine.status();
  ModelSpec model = testing::TinyModel();
  model.geometry.num_heads = 4;
  ASSERT_TRUE((*engine)->RegisterModel("t", model).ok());
  std::atomic<bool> stop{false};
  std::thread control([&] {
    while (!stop) {
      (*engine)->Stats();
      ++calls;
    }
  });
  const kernels::Geometry& g = model.geometry;
  const std::vector<std::byte> chunk(size_t(4) * g.kv_lora_rank * (g.nope_dim + g.v_dim) * 2);
  EXPECT_TRUE((*engine)->LoadWeights("t", model.id, (*engine)->NewUpload(), 0, 0, 4, chunk).ok());
  stop = true;
  control.join();
  EXPECT_GT(between, 0);
}

}  // namespace
}  // namespace mla::scheduler
