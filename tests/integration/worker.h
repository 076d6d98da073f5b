// A small model worker: drives steps on a server and compares every reply with its own dense model.
#ifndef MLA_TESTS_INTEGRATION_WORKER_H_
#define MLA_TESTS_INTEGRATION_WORKER_H_

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "tests/integration/dense_model.h"

namespace mla::integration {

struct Track {  // a sequence and its expected contents
  client::Sequence sequence;
  DenseCache cache;
};

class Worker final {
 public:
  // Registers `model_id` (equal repeats are fine) and opens a session.
  Worker(client::Client* client, const Dims& dims, const std::string& model_id, uint64_t seed);

  // Uploads random weights; needed before EXPANDED.
  absl::Status Upload();
  absl::StatusOr<Track> Open();
  // Runs one whole step: `rows[i]` new rows for `tracks[i]`, every layer, then EndStep, which keeps
  // `keep[i]` of them (empty: all). Returns the first failure, or INTERNAL with the first reply
  // that differs from the dense model.
  absl::Status Step(const std::vector<Track*>& tracks, const std::vector<uint32_t>& rows,
                    v1::Profile profile, const std::vector<uint32_t>& keep = {},
                    v1::DType o_dtype = v1::DTYPE_F32);

  // From here on tensors lie in the session's device memory, which must be the fake runtime's.
  void UseDevice() { on_device_ = true; }
  // From here on steps begin without waiting for the answer.
  void Pipeline() { pipelined_ = true; }

  client::Session& session() { return *session_; }
  const Dims& dims() const { return dims_; }
  const std::string& model_id() const { return model_id_; }
  std::mt19937_64& random() { return random_; }
  const Weights& weights() const { return weights_; }
  void set_weights(const Weights& weights) { weights_ = weights; }
  uint32_t most_messages() const { return most_messages_; }  // pieces of the largest Attend so far

 private:
  absl::Status Layer(client::Step* step, int layer, const std::vector<Track*>& tracks,
                     const std::vector<uint32_t>& rows, v1::Profile profile, v1::DType o_dtype);

  client::Client* const client_;
  const Dims dims_;
  const std::string model_id_;
  std::mt19937_64 random_;
  Weights weights_;
  std::unique_ptr<client::Session> session_;
  uint32_t most_messages_ = 0;
  bool on_device_ = false, pipelined_ = false;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_WORKER_H_
