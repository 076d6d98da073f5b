// Uploads of weights at the same time as other calls.
#include <atomic>
#include <chrono>
#include <cstring>
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

// A list of weights names registrations: a later model of the same name is not read for it.
TEST(EngineUploadTest, WeightsAreReadOfTheModelThatWasListed) {
  RealClock clock;
  EngineOptions options;
  options.limits = testing::TinyLimits();
  auto engine = Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), &clock);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const ModelSpec model = testing::TinyModel();
  const kernels::Geometry& g = model.geometry;
  const auto heads = static_cast<size_t>(g.num_heads);
  std::vector<std::byte> chunk(heads * static_cast<size_t>(model.head_elements()) * 2);
  for (size_t i = 0; i < chunk.size(); ++i) chunk[i] = std::byte(i % 61);
  const auto upload = [&] {
    ASSERT_TRUE((*engine)->RegisterModel("t", model).ok());
    const UploadId id = (*engine)->NewUpload();
    for (int32_t layer = 0; layer < model.layers; ++layer) {
      ASSERT_TRUE((*engine)->LoadWeights("t", model.id, id, layer, 0, g.num_heads, chunk).ok());
    }
    ASSERT_TRUE((*engine)->CommitWeights("t", model.id, id).ok());
  };
  EXPECT_TRUE((*engine)->AllWeights().empty());
  upload();
  const std::vector<HeldWeights> held = (*engine)->AllWeights();
  ASSERT_EQ(held.size(), 1u);
  std::vector<kernels::Bf16> head(static_cast<size_t>(model.head_elements()));
  ASSERT_TRUE((*engine)->ReadWeights(held[0], 0, 0, head).ok());
  EXPECT_EQ(std::memcmp(head.data(), chunk.data(),
                        static_cast<size_t>(g.nope_dim) * static_cast<size_t>(g.kv_lora_rank) * 2),
            0);
  ASSERT_TRUE((*engine)->UnregisterModel("t", model.id).ok());
  EXPECT_EQ((*engine)->ReadWeights(held[0], 0, 0, head).code(), absl::StatusCode::kNotFound);
  upload();
  EXPECT_EQ((*engine)->ReadWeights(held[0], 0, 0, head).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE((*engine)->ReadWeights((*engine)->AllWeights().at(0), 0, 0, head).ok());
}

}  // namespace
}  // namespace mla::scheduler
