// One seed of the simulation of drains to other servers. In one thread it runs three real engines,
// the real hand-over between them, and connections that lose messages. Clients open, extend, cut,
// fork and release sequences during the drain. The connection breaks at any message, replies are
// lost, imports end long after their caller has given up, the peer refuses, is full, restarts or
// lies, the drain is cancelled, and the draining server dies. A drain has one peer or two.
//
// - A sequence is where it was, or where its peer has said that it is, with all its rows, its
//   tenant and its id. The old server names the peer from then on and not before.
// - It is lost only with the server that had it.
// - A model has all weights that its peer has sent, or what it had before; no tenant is charged
//   for weights that are not there.
// - The other server has no part of it, except during an import, and until its lease ends if the
//   peer could not be told.
// - The reply to the drain states the outcome of each sequence, and each that was refused was
//   refused by every peer.
// - In the end no engine holds anything.
#ifndef MLA_TESTS_SIMULATION_HAND_OVER_HAND_OVER_SIMULATOR_H_
#define MLA_TESTS_SIMULATION_HAND_OVER_HAND_OVER_SIMULATOR_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/clock.h"
#include "server/hand_over/hand_over.h"
#include "tests/simulation/hand_over/sim_server.h"

namespace mla::simulation {

struct HandOverCounts {
  int64_t operations = 0;  // operations that had an effect
  int64_t drains = 0, moved = 0, refused = 0, kept = 0;
  int64_t divided = 0;    // drains whose sequences went to two servers
  int64_t passed_on = 0;  // sequences that one peer refused and another took
  int64_t cut = 0;        // broken connections
  int64_t late = 0;       // imports that continued after their caller's end
  int64_t crashes = 0;    // crashes of draining servers
  int64_t checked = 0;    // sequences whose rows were compared
  int64_t weights_moved = 0, weights_refused = 0, weights_cut = 0;  // models
  int64_t weight_parts = 0, weights_spoilt = 0;  // parts that came, and transfers with a fault
  void Add(const HandOverCounts& other) {
    operations += other.operations;
    drains += other.drains;
    moved += other.moved;
    refused += other.refused;
    kept += other.kept;
    divided += other.divided;
    passed_on += other.passed_on;
    cut += other.cut;
    late += other.late;
    crashes += other.crashes;
    checked += other.checked;
    weights_moved += other.weights_moved;
    weights_refused += other.weights_refused;
    weights_cut += other.weights_cut;
    weight_parts += other.weight_parts;
    weights_spoilt += other.weights_spoilt;
  }
};

class HandOverSimulator final {
 public:
  explicit HandOverSimulator(uint64_t seed);

  // Returns "" or a violation.
  std::string Run(int operations);
  const HandOverCounts& counts() const { return counts_; }
  uint64_t hash() const { return hash_; }

 private:
  class Peer;
  struct Text {
    std::string tenant;
    int server = 0;
    uint64_t epoch = 0;
    RowKeys rows;
  };
  // An import whose caller has got no reply.
  struct Late {
    int server = 0;
    uint64_t boot_id = 0;
    v1::ImportTarget target;
    std::vector<v1::PagesPart> parts;
    bool whole = false;
  };
  // Faults of one drain, drawn at its beginning: in percent, of each call or message.
  struct Faults {
    uint64_t unreachable = 0, cut = 0, lost_answer = 0, late = 0, lie = 0, restart = 0, stop = 0,
             client = 0, lost_take_back = 0;
  };
  static constexpr size_t kServers = 3;

  uint64_t Pick(uint64_t below);
  bool Chance(uint64_t percent) { return Pick(100) < percent; }

  // Operations of clients; each returns true if it had an effect. A server that is `draining_`
  // accepts no new sequences.
  bool Operate();
  bool Open(int server);
  bool Extend(int server);
  bool Truncate(int server);
  bool Fork(int server);
  bool Release(int server);
  bool Look(int server);
  bool LoadWeights(int server);
  bool Restart(int server);
  bool Drain(int from);
  Faults DrawFaults();
  void ClientAt(int server);
  // A sequence of that server, or end() if there is none.
  std::map<uint64_t, Text>::iterator AnyText(int server);
  // Expects that a refusal is that of a draining server.
  void ExpectDraining(const absl::Status& status, bool opens);

  void CheckAnswer(int from, const std::map<uint64_t, Text>& before,
                   const server::HandOver& hand_over);
  // `peers`: how many can take sequences.
  void CheckOutcome(int from, const v1::HandedOver& one, size_t peers);
  // The server with this address, or -1.
  int ServerAt(const std::string& address) const;
  void RunLate(size_t index);
  void DropServer(int server);
  // Checks the replies to clients about each sequence, and the other contents of the servers.
  void Check();
  void CheckText(uint64_t id, Text* text);
  void CheckMoved(uint64_t id, Text* text);
  void CheckRows(uint64_t id, const Text& text);
  void CheckStrays(int server);
  void CheckWeights(int server);
  void Finish();
  void Fail(const std::string& what);
  bool failed() const { return !violation_.empty(); }

  uint64_t random_;
  scheduler::SimulatedClock clock_;
  std::array<std::unique_ptr<SimServer>, kServers> servers_;
  std::map<uint64_t, Text> texts_;
  std::vector<Late> late_;
  // Which weights each tenant's model has, by server; absent: none.
  std::map<std::pair<int, std::string>, int> weights_;
  // Sequences that the server may have although they are elsewhere: an import of it is in progress,
  // or its end is not known. If true, it stays until its lease ends.
  std::map<std::pair<int, uint64_t>, bool> strays_;
  // Attempts that must have no effect from now on.
  std::set<uint64_t> given_up_;
  // Sequences of the drain that a peer has confirmed in time, and those that it has refused.
  std::set<std::pair<int, uint64_t>> acknowledged_, refused_;
  // Sequences of the drain that a peer may have, without an answer: no other one may get them.
  std::set<std::pair<int, uint64_t>> unsure_;
  int draining_ = -1;
  std::string named_;                      // the peer that refusals of that server name
  server::HandOver* hand_over_ = nullptr;  // while it runs
  bool crashed_ = false;                   // the server that drains is gone
  bool in_import_ = false;                 // the peer is in ServeImport, so it cannot restart
  uint64_t next_key_ = 1;
  std::string violation_;
  uint64_t hash_ = 0xcbf29ce484222325u;
  HandOverCounts counts_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_HAND_OVER_HAND_OVER_SIMULATOR_H_
