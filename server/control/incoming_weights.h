// The receiving side of UploadWeights: which transfers of weights are under way, and what a call
// does to them.
//
// One transfer of a model at a time. A worker's upload is a transfer of one call. A server that
// drains brings weights of its tenants as an operator; then the model is registered too, several
// calls may bring chunks at a time, and unless all weights come, the model is unregistered again.
//
// Threading: any thread; a call holds its thread until it ends.
#ifndef MLA_SERVER_CONTROL_INCOMING_WEIGHTS_H_
#define MLA_SERVER_CONTROL_INCOMING_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "mla/v1/model.pb.h"
#include "scheduler/engine.h"
#include "server/control/weights_transfer.h"

namespace mla::server {

// Returns the next message of a call, or null after the last one.
using WeightsSource = std::function<absl::StatusOr<const v1::UploadWeightsRequest*>()>;

class IncomingWeights final {
 public:
  // The engine outlives it. A chunk's payload has at most `chunk_bytes`.
  IncomingWeights(scheduler::Engine* engine, int64_t chunk_bytes)
      : engine_(engine), chunk_bytes_(chunk_bytes) {}

  // Serves a call of `caller` from its header on, with all messages after it. Calls `accepted` once
  // the header is, unless nothing needs to follow. REQUIRES: the header's names are valid, and the
  // caller may act for header.tenant if there is one. Errors come from CheckHeader,
  // RegisterForWeights, WeightsUpload and `source`; also NOT_FOUND for a model that the caller does
  // not have, ABORTED (upload_under_way), and for a part FAILED_PRECONDITION (transfer_ended).
  absl::Status Take(const std::string& caller, const v1::UploadWeightsRequest::Header& header,
                    const WeightsSource& source, const std::function<void()>& accepted,
                    v1::UploadWeightsReply* reply);

 private:
  using Header = v1::UploadWeightsRequest::Header;
  struct UnderWay {
    std::string caller;
    uint64_t attempt = 0;  // 0: takes no parts
    std::shared_ptr<WeightsTransfer> transfer;
  };

  // INVALID_ARGUMENT for fields that do not go together.
  static absl::Status CheckHeader(const Header& header);
  absl::Status TakeOver(const std::string& caller, const Header& header,
                        const WeightsSource& source, const std::function<void()>& accepted,
                        v1::UploadWeightsReply* reply);
  absl::Status TakePart(const std::string& caller, const Header& header,
                        const WeightsSource& source, const std::function<void()>& accepted,
                        v1::UploadWeightsReply* reply);
  // Takes the chunks of the call that begins a transfer to the tenant's model.
  absl::Status TakeTransfer(const std::string& caller, const std::string& tenant,
                            const Header& header, const WeightsSource& source,
                            const std::function<void()>& accepted, v1::UploadWeightsReply* reply);

  scheduler::Engine* const engine_;
  const int64_t chunk_bytes_;
  Mutex mutex_;
  std::map<std::pair<std::string, std::string>, UnderWay> transfers_
      ABSL_GUARDED_BY(mutex_);  // by tenant and model
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_INCOMING_WEIGHTS_H_
