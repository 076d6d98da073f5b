// A server of the simulation of hand-overs: a real engine, the receiver of its imports, and rows
// that a test can tell apart. A restart loses all its contents.
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
#include "server/control/incoming_weights.h"
#include "server/hand_over/abandoned_imports.h"
#include "server/hand_over/hand_over.h"

namespace mla::simulation {

// The rows of a sequence: a number for each, which determines all its bytes.
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

  // Makes a new sequence of rows, or adds rows to an existing one (id != 0).
  absl::StatusOr<scheduler::SequenceInfo> AddRows(const std::string& tenant, uint64_t id,
                                                  uint64_t epoch, int64_t length,
                                                  const RowKeys& keys);
  // Returns OK if the sequence holds exactly these rows.
  absl::Status CheckRows(const std::string& tenant, const scheduler::SequenceInfo& info,
                         const RowKeys& keys);
  // Does what Cache.Import does for an operator over TLS. Calls `between` before it takes each
  // part. The stream ends after the parts: successfully if `whole`, otherwise by a broken
  // connection.
  absl::StatusOr<v1::ImportReply> ServeImport(const v1::ImportTarget& target,
                                              const std::vector<v1::PagesPart>& parts, bool whole,
                                              const std::function<void()>& between);
  // Loads weights of the tenant's model: one of kWeightVariants, which differ in all bytes. An
  // error if it has others already.
  static constexpr int kWeightVariants = 2;
  absl::Status LoadWeights(const std::string& tenant, int variant);
  // Returns which weights the tenant's model has, or -1 if it has none and is charged for none.
  // INTERNAL if it is anything else.
  absl::StatusOr<int> WeightsOf(const std::string& tenant);
  // Does what Models.UploadWeights does for an operator over TLS; the rest as ServeImport.
  absl::StatusOr<v1::UploadWeightsReply> ServeWeights(
      const std::vector<v1::UploadWeightsRequest>& messages, bool whole,
      const std::function<void()>& between);
  // Does what Admin.EvictSequences does.
  uint32_t Evict(const v1::EvictSequencesRequest& request);

 private:
  // Moves all groups of an export or import to or from the rows' bytes.
  absl::Status MoveRows(const std::string& tenant, const scheduler::MovingPages& pages, bool in,
                        const RowKeys& keys);

  const std::string address_;
  const std::vector<std::string> tenants_;
  scheduler::SimulatedClock* const clock_;
  uint64_t boot_id_ = 0, next_id_;
  server::HandOverCounters counters_;
  std::unique_ptr<scheduler::Engine> engine_;
  std::unique_ptr<server::AbandonedImports> abandoned_;
  std::unique_ptr<server::IncomingWeights> incoming_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_HAND_OVER_SIM_SERVER_H_
