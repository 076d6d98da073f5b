// Makes a table with the tiny model of EngineHarness, and weights to load into it, for tests.
#ifndef MLA_SCHEDULER_TESTING_TINY_MODEL_FIXTURE_H_
#define MLA_SCHEDULER_TESTING_TINY_MODEL_FIXTURE_H_

#include <cstddef>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::scheduler {

class TinyModelTest : public ::testing::Test {
 protected:
  TinyModelTest() : table_(h_.core().models()), tenant_(h_.core().FindTenant(h_.tenant())) {
    model_ = *table_.Find(tenant_, "tiny", "model_id");
    weights_.resize(2 * 8 * (6 + 5) * 2);  // two heads of one layer, bf16
    for (size_t i = 0; i < weights_.size(); ++i) weights_[i] = std::byte(i * 7);
  }
  absl::Status Load(UploadId upload, int layer, int head, int heads) {
    const std::span<const std::byte> all(weights_);
    return table_.weights().Load(*model_, upload, layer, head, heads,
                                 all.first(size_t(heads) * 8 * 11 * 2));
  }

  testing::EngineHarness h_;
  ModelTable& table_;
  TenantKey tenant_;
  Model* model_ = nullptr;
  std::vector<std::byte> weights_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TESTING_TINY_MODEL_FIXTURE_H_
