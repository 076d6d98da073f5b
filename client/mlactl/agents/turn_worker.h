// Runs turns of agents' conversations as a model worker does: It opens a sequence with the contents
// of its rows, sends the rows that the server does not have, then one row a step, and releases the
// sequence.
//
// The destructor releases all sequences of the worker. Threading: one thread.
#ifndef MLA_CLIENT_MLACTL_AGENTS_TURN_WORKER_H_
#define MLA_CLIENT_MLACTL_AGENTS_TURN_WORKER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "client/mlactl/bench/bench_options.h"
#include "client/mlactl/load/trace.h"

namespace mla::mlactl {

// The result of one turn. Times are in nanoseconds.
struct TurnResult {
  bool done = false;
  // The beginning and end of the call that opens its sequence, in Unix time.
  int64_t open_from_ms = 0, open_to_ms = 0;
  double start_s = 0;                            // since the run began
  uint32_t found = 0;                            // rows of the input that did not have to be sent
  v1::MatchEnd end = v1::MATCH_END_UNSPECIFIED;  // reason why the match ended
  int64_t first_ns = 0;          // from the call that opens the sequence until the first output
  std::vector<int64_t> next_ns;  // one step of one row for each later output
  uint32_t refused = 0;          // how often the server had no room and the turn was tried again
};

class TurnWorker final {
 public:
  // Connects and opens a session. `options` must outlive the worker. `stopping` is called before
  // each layer.
  static absl::StatusOr<std::unique_ptr<TurnWorker>> Create(const BenchOptions& options,
                                                            const std::string& model_id,
                                                            uint32_t index,
                                                            std::function<bool()> stopping);

  // Runs one turn; CANCELLED when the run stops. `keep`: the sequence stays for branches until
  // Drop, or the next turn that is not a branch. A turn that the server refuses for lack of room
  // begins again after the hinted time.
  absl::StatusOr<TurnResult> Run(const Trace& trace, const Turn& turn, bool keep);
  void Drop() { kept_.reset(); }
  std::string_view transport() const { return session_->transport(); }

 private:
  TurnWorker(const BenchOptions& options, const std::string& model_id,
             std::function<bool()> stopping)
      : options_(options), model_id_(model_id), stopping_(std::move(stopping)) {}
  absl::Status Connect(uint32_t index);
  void PlaceTensors(uint32_t index);
  absl::Status Try(const Trace& trace, const Turn& turn, bool keep, TurnResult* result);
  absl::StatusOr<client::Sequence> Open(const Trace& trace, const Turn& turn, TurnResult* result);
  // Runs one step of all layers.
  absl::Status Append(client::Sequence* sequence, uint32_t rows);

  struct Kept {
    Turn turn;
    client::Sequence sequence;
  };

  const BenchOptions& options_;
  const std::string model_id_;
  const std::function<bool()> stopping_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Session> session_;
  std::optional<Kept> kept_;
  uint32_t most_rows_ = 0;  // per step
  std::vector<std::byte> own_;
  client::AttendCall call_;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_AGENTS_TURN_WORKER_H_
