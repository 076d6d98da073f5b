// A small worker for a model with a window. It drives steps and compares every reply with dense
// attention over its own copy of the rows and entries.
//
// Not thread-safe.
#ifndef MLA_TESTS_INTEGRATION_WINDOW_WORKER_H_
#define MLA_TESTS_INTEGRATION_WINDOW_WORKER_H_

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "tests/integration/dense_model.h"

namespace mla::integration {

// The expected contents of a sequence: for each of two layers its rows and entries, bf16, [n,
// Dims().row()].
struct WindowText {
  struct Layer {
    std::vector<uint16_t> rows, entries;
  };
  Layer layers[2];
};

class WindowWorker final {
 public:
  static constexpr uint32_t kWindow = 6, kTopK = 8;
  static constexpr uint32_t kRatio = 4;  // ratio of the second layer; the first has no entries

  explicit WindowWorker(uint64_t seed);

  v1::ModelSpec Spec(const std::string& model_id) const;
  const Dims& dims() const { return dims_; }
  // [layers, heads]: sinks that the expected replies use.
  std::vector<float>& sinks() { return sinks_; }

  // Runs one whole step of `rows` rows of the sequence and adds them to its text. `lists` are of
  // the second layer, by row, or empty: all entries. Returns the first failure, or INTERNAL with
  // the first reply that differs.
  absl::Status Step(client::Session* session, const std::string& model_id,
                    client::Sequence* sequence, WindowText* text, uint32_t rows,
                    const std::vector<std::vector<int32_t>>& lists = {});
  uint32_t messages() const { return messages_; }  // pieces of the last Attend

 private:
  absl::Status Compare(uint32_t layer, const WindowText::Layer& cached, uint64_t visible,
                       const std::vector<int32_t>* list, std::span<const uint16_t> q,
                       const float* o, const float* lse) const;

  const Dims dims_;
  std::mt19937_64 random_;
  std::vector<float> sinks_;
  uint32_t messages_ = 0;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_WINDOW_WORKER_H_
