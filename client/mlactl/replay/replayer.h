// Sends a recording's requests to a server, one after another, and compares the replies with the
// recorded ones.
//
// Models get new names on the server. The destructor releases everything that was created and
// ignores errors. Threading: one thread.
#ifndef MLA_CLIENT_MLACTL_REPLAY_REPLAYER_H_
#define MLA_CLIENT_MLACTL_REPLAY_REPLAYER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "client/mlactl/load/latency_histogram.h"
#include "client/mlactl/replay/recording.h"
#include "client/mlactl/tensors/output_comparison.h"
#include "client/mlactl/tensors/value_bounds.h"

namespace mla::mlactl {

struct ReplayOptions {
  v1::DType o_dtype = v1::DTYPE_F32;  // type of the server's outputs
  OutputRule rule;
};

struct ReplayCounts {
  uint64_t attends = 0, steps = 0, rows = 0;  // rows: over all layers
  LatencyHistogram attend_times;
};

class Replayer final {
 public:
  // `writer`, if not null, gets the recording with this server's outputs in place of the recorded
  // ones.
  Replayer(client::Client* client, RecordingReader* reader, RecordingWriter* writer,
           const ReplayOptions& options);
  ~Replayer();

  // Replays all records. `progress` is called at every record and returns whether to go on;
  // CANCELLED if not. An error names the record that could not be replayed. Outputs that differ are
  // not an error.
  absl::Status Run(const std::function<bool()>& progress);

  const OutputComparison& comparison() const { return comparison_; }
  const ReplayCounts& counts() const { return counts_; }
  // Returns the server's names of the models that it has registered.
  std::vector<std::string> model_ids() const;
  // Returns "inline", "shm", "ring" or "ucx". REQUIRES: Run has begun.
  std::string transport() const { return std::string(session_->transport()); }

 private:
  struct Model;
  struct OpenSequence;
  struct OpenStep;

  absl::Status RegisterModels();
  absl::Status Replay(const Record& record);
  absl::Status Upload(Record* record, const std::function<bool()>& progress);
  absl::Status Create(const Record& record);
  absl::Status Begin(const Record& record);
  absl::Status Attend(const Record& record);
  absl::Status End(const Record& record);
  void AddKv(const Record& record, OpenStep* step);
  void Compare(const Record& record, const OpenStep& step);
  absl::Status Write(const Record& record);

  client::Client* const client_;
  RecordingReader* const reader_;
  RecordingWriter* const writer_;
  const ReplayOptions options_;
  OutputComparison comparison_;
  ReplayCounts counts_;
  std::map<std::string, std::unique_ptr<Model>> models_;         // by the file's names
  std::map<uint64_t, std::shared_ptr<OpenSequence>> sequences_;  // by the file's numbers
  std::unique_ptr<client::Session> session_;
  std::map<uint64_t, std::unique_ptr<OpenStep>> steps_;
  std::vector<std::byte> output_;  // output of the last attend, as received
  std::vector<float> o_, lse_;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_REPLAY_REPLAYER_H_
