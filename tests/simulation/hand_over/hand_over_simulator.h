// One seed of the simulation of drains to another server: two real engines in one thread, the real
// hand-over between them, and a connection that loses what it carries. Clients open, extend, cut,
// fork and release sequences meanwhile; the connection breaks at any message, the answer is lost,
// imports end long after their caller has given them up, the peer refuses, is full, restarts or
// lies, the drain is cancelled, and the server that drains dies:
//
//   - a sequence is where it was, or where its peer has said that it is, with all its rows, as its
//     tenant's and under its id; the old server names the peer then and not before;
//   - it is lost only with the server that had it;
//   - the other server has nothing of it, but while an import is on its way, and until its lease
//     ends where the peer could not be told;
//   - the answer of the drain says of each sequence what became of it;
//   - in the end no engine holds anything.
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
  int64_t operations = 0;  // that did something
  int64_t drains = 0, moved = 0, refused = 0, kept = 0;
  int64_t cut = 0;      // connections
  int64_t late = 0;     // imports that went on behind their caller's end
  int64_t crashes = 0;  // of servers that drained
  int64_t checked = 0;  // sequences whose rows were compared
  void Add(const HandOverCounts& other);
};

class HandOverSimulator final {
 public:
  explicit HandOverSimulator(uint64_t seed);

  // Empty, or what went wrong.
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
  // An import whose caller has got no answer.
  struct Late {
    int server = 0;
    uint64_t boot_id = 0;
    v1::ImportTarget target;
    std::vector<v1::PagesPart> parts;
    bool whole = false;
  };
  // What may go wrong with one drain, drawn at its beginning: in percent, of each call or message.
  struct Faults {
    uint64_t unreachable = 0, cut = 0, lost_answer = 0, late = 0, lie = 0, restart = 0, stop = 0,
             client = 0, lost_take_back = 0;
  };

  uint64_t Pick(uint64_t below);
  bool Chance(uint64_t percent) { return Pick(100) < percent; }

  // Operations of clients: true if anything was done. While `draining` is a server's number it
  // takes nothing new.
  bool Operate();
  bool Open(int server);
  bool Extend(int server);
  bool Truncate(int server);
  bool Fork(int server);
  bool Release(int server);
  bool Look(int server);
  bool Restart(int server);
  bool Drain(int from);
  void ClientAt(int server);
  // A sequence that is there; end() if there is none.
  std::map<uint64_t, Text>::iterator AnyText(int server);
  // Whether a refusal is the one of a server that drains.
  void ExpectDraining(const absl::Status& status, bool opens);

  void CheckAnswer(int from, const std::map<uint64_t, Text>& before,
                   const server::HandOver& hand_over);
  void RunLate(size_t index);
  void DropServer(int server);
  // What clients are told of each sequence, and what else is there.
  void Check();
  void CheckText(uint64_t id, Text* text);
  void CheckMoved(uint64_t id, Text* text);
  void CheckRows(uint64_t id, const Text& text);
  void CheckStrays(int server);
  void Finish();
  void Fail(const std::string& what);
  bool failed() const { return !violation_.empty(); }

  uint64_t random_;
  scheduler::SimulatedClock clock_;
  std::array<std::unique_ptr<SimServer>, 2> servers_;
  std::map<uint64_t, Text> texts_;
  std::vector<Late> late_;
  // Sequences that the server may have though they are elsewhere: an import of it is under way, or
  // its end has not been heard of. The second: it stays until its lease ends.
  std::map<std::pair<int, uint64_t>, bool> strays_;
  // Attempts that must bring nothing from now on.
  std::set<uint64_t> given_up_;
  // Sequences of the drain of which the peer has said, in time, that it has them.
  std::set<uint64_t> acknowledged_;
  int draining_ = -1;
  bool in_import_ = false;  // the peer is in ServeImport: it cannot restart
  uint64_t next_key_ = 1;
  std::string violation_;
  uint64_t hash_ = 0xcbf29ce484222325u;
  HandOverCounts counts_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_HAND_OVER_HAND_OVER_SIMULATOR_H_
