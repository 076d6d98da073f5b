// One simulated model worker of `mlactl bench`. It has its own connection and session, and runs
// steps over a batch of sequences that it has filled to the context's length.
//
// The destructor releases everything that the worker has created. Threading: one thread.
#ifndef MLA_CLIENT_MLACTL_BENCH_BENCH_WORKER_H_
#define MLA_CLIENT_MLACTL_BENCH_BENCH_WORKER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "client/mlactl/bench/bench_options.h"
#include "client/mlactl/load/load_loop.h"

namespace mla::mlactl {

// A registered model, with random weights when a run is EXPANDED or PROJECTED. The destructor
// unregisters it.
class BenchModel final {
 public:
  // `id` is a name that no model has. `progress` is called with the part that is done, 0..1, and
  // returns whether to go on; if it returns false, the call ends with CANCELLED.
  // FAILED_PRECONDITION if the server holds W_UQ and W_O in another type than is asked for.
  static absl::StatusOr<std::unique_ptr<BenchModel>> Create(
      client::Client* client, const BenchOptions& options, const std::string& id,
      const std::function<bool(double done)>& progress);
  ~BenchModel();
  const std::string& id() const { return id_; }
  // Unregisters the model after all its sequences are gone. The destructor ignores errors.
  absl::Status Remove();

 private:
  BenchModel(client::Client* client, std::string id) : client_(client), id_(std::move(id)) {}
  absl::Status Upload(const BenchOptions& options, const std::function<bool(double)>& progress);
  absl::Status UploadProjected(const BenchOptions& options,
                               const std::function<bool(double)>& progress);
  // Returns the bound of a chunk of weights, unless one head is larger.
  uint64_t MostChunkBytes() const;

  client::Client* client_;
  const std::string id_;
};

class BenchWorker final {
 public:
  // Connects, opens the session and the sequences. `index` makes the data of workers different.
  static absl::StatusOr<std::unique_ptr<BenchWorker>> Create(const BenchOptions& options,
                                                             const BenchPoint& point,
                                                             const std::string& model_id,
                                                             uint32_t index);
  ~BenchWorker();

  // Fills the sequences to the context's length; `progress` is as in BenchModel::Create.
  absl::Status FillContext(const std::function<bool(double done)>& progress);
  // Runs one step of all layers and times each. CANCELLED if the recorder is stopping.
  absl::Status Step(LoadRecorder* recorder);
  // Returns the session's transport: "inline", "shm", "ring" or "ucx".
  std::string transport() const { return std::string(session_->transport()); }

 private:
  BenchWorker(const BenchOptions& options, const BenchPoint& point, const std::string& model_id)
      : options_(options), point_(point), model_id_(model_id) {}
  absl::Status Open(uint32_t index);
  absl::Status OpenSequences(uint32_t count);
  absl::Status Append(client::Sequence* sequence, uint32_t rows, const std::vector<uint16_t>& kv);
  std::byte* Allocate(uint64_t bytes, std::vector<std::byte>* own);
  void PlaceTensors(uint32_t index);
  void EncodeTensors(uint32_t index);
  void TouchTensors();

  const BenchOptions& options_;
  const BenchPoint& point_;
  const std::string model_id_;
  std::unique_ptr<client::Client> client_;
  std::vector<client::Sequence> sequences_;
  std::unique_ptr<client::Session> session_;
  std::vector<client::StepRows> rows_;
  std::vector<float> rotations_;  // of the rows of a step, if they are PROJECTED
  std::vector<uint32_t> keep_;    // committed rows of each sequence; empty: all rows are committed
  std::vector<std::byte> own_in_, own_out_;
  std::span<std::byte> in_, out_;
  client::AttendCall call_;
  uint64_t attend_bytes_ = 0;
  uint8_t touched_ = 0;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_BENCH_BENCH_WORKER_H_
