// Chooses how many threads poll and copy for the streams, by configuration, CPUs and backend.
#ifndef MLA_SERVER_WIRE_THREADS_H_
#define MLA_SERVER_WIRE_THREADS_H_

#include "kernels/attention_backend.h"
#include "proto/wire/thread_team.h"
#include "server/config/config.h"
#include "server/grpc/completion_poller.h"

namespace mla::server {

CompletionPollerOptions PollingOf(const Config::Wire& wire, const kernels::BackendInfo& backend);
wire::ThreadTeamOptions TeamOf(const Config::Wire& wire, const kernels::BackendInfo& backend);

}  // namespace mla::server

#endif  // MLA_SERVER_WIRE_THREADS_H_
