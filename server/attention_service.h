// The Attention service: creates one AttendStream per call and keeps house for all of them.
//
// Ownership: streams own themselves (gRPC's reactor rule); the service only lists them. Stop must
// be called after the gRPC server has shut down and before the service is destroyed.
// Threading: one housekeeping thread resumes stalled streams when staging memory comes back and
// cuts those whose client has stopped reading.
#ifndef MLA_SERVER_ATTENTION_SERVICE_H_
#define MLA_SERVER_ATTENTION_SERVICE_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

#include "mla/v1/attention.grpc.pb.h"
#include "server/attend_stream.h"

namespace mla::server {

class AttentionService final
    : public v1::Attention::WithRawCallbackMethod_Attend<v1::Attention::Service>,
      public AttendStreamRegistry {
 public:
  explicit AttentionService(WireContext shared);
  ~AttentionService() override;

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Attend(
      grpc::CallbackServerContext* context) override;

  void OnStalled(AttendStream* stream) override;
  void OnGone(AttendStream* stream) override;

  // Waits until no stream is left, then ends the housekeeping thread.
  void Stop();

 private:
  void KeepHouse();
  void ResumeStalled();

  const WireContext shared_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<AttendStream*> streams_;
  std::deque<AttendStream*> stalled_;
  bool stop_ = false;
  std::thread housekeeper_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_ATTENTION_SERVICE_H_
