// Fills the header of the reply to an answered request: everything except its tensors.
#ifndef MLA_SERVER_ATTEND_ATTEND_REPLY_H_
#define MLA_SERVER_ATTEND_ATTEND_REPLY_H_

#include <cstdint>

#include "mla/v1/attention.pb.h"
#include "server/attend/attend_message.h"

namespace mla::server {

// Replaces the contents of `reply`. REQUIRES: the message is answered. Sets Timings.write_us to the
// time between the answer and this call.
void FillReply(const AttendMessage& message, uint64_t boot_id, v1::AttendStreamReply* reply);

}  // namespace mla::server

#endif  // MLA_SERVER_ATTEND_ATTEND_REPLY_H_
