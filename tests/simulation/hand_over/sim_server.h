// A server of the simulation of hand-overs: a real engine, what takes its imports in, and rows that
// a test can tell apart. It restarts with nothing of what it had.
#ifndef MLA_TESTS_SIMULATION_HAND_OVER_SIM_SERVER_H_
#define MLA_TESTS_SIMULATION_HAND_OVER_SIM_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "server/hand_over/abandoned_imports.h"
#include "server/hand_over/hand_over.h"

namespace mla::simulation {

// The rows of a sequence: a number for each, from which all its bytes follow.
using RowKeys = std::vector<uint64_t>;

class SimServer {
 public:
  // `tenants` all have the same model. The clock outlives the server.
  SimServer(std::string address, std::vector<std::string> tenants,
            scheduler::SimulatedClock* clock);

  scheduler::Engine& engine() { return *engine_; }
  uint64_t boot_id() const { return boot_id_; }
  const std::string& address() const { return address_; }
  server::HandOverCounters& counters() { return counters_; }
  void Restart();

  // A new sequence of rows, or rows behind those of one (id != 0).
  absl::StatusOr<scheduler::SequenceInfo> AddRows(const std::string& tenant, uint64_t id,
                                                  uint64_t epoch, int64_t length,
                                                  const RowKeys& keys);
  // Whether the sequence holds these rows and no others.
  absl::Status CheckRows(const std::string& tenant, const scheduler::SequenceInfo& info,
                         const RowKeys& keys);
  // What Cache.Import does with a caller that is an operator over TLS. `between` is called before
  // each part is taken. The stream ends behind the parts: well if `whole`, else by a cut.
  absl::StatusOr<v1::ImportReply> ServeImport(const v1::ImportTarget& target,
                                              const std::vector<v1::PagesPart>& parts, bool whole,
                                              const std::function<void()>& between);
  // What Admin.EvictSequences does.
  uint32_t Evict(const v1::EvictSequencesRequest& request);

 private:
  // All groups of an export or import, to or from the rows' bytes.
  absl::Status MoveRows(const std::string& tenant, const scheduler::MovingPages& pages, bool in,
                        const RowKeys& keys);

  const std::string address_;
  const std::vector<std::string> tenants_;
  scheduler::SimulatedClock* const clock_;
  uint64_t boot_id_ = 0, next_id_;
  server::HandOverCounters counters_;
  std::unique_ptr<scheduler::Engine> engine_;
  std::unique_ptr<server::AbandonedImports> abandoned_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_HAND_OVER_SIM_SERVER_H_
