// HandOverSimulator: the checks after each operation.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/testing/engine_harness.h"
#include "tests/simulation/hand_over/hand_over_simulator.h"

namespace mla::simulation {

void HandOverSimulator::CheckAnswer(int from, const std::map<uint64_t, Text>& before,
                                    const server::HandOver& hand_over) {
  for (auto& [id, text] : texts_) CheckText(id, &text);
  std::set<uint64_t> named;
  for (const v1::HandedOver& one : hand_over.outcomes()) {
    const bool moved = one.outcome() == v1::HAND_OVER_OUTCOME_MOVED;
    if (strays_.contains({from, one.sequence_id()})) {
      // A sequence that an earlier drain has left here is drained like the others.
      if (moved) strays_[{1 - from, one.sequence_id()}] = true;
      if (moved) strays_.erase({from, one.sequence_id()});
      continue;
    }
    const auto was = before.find(one.sequence_id());
    if (was == before.end() || was->second.server != from || one.tenant() != was->second.tenant ||
        !named.insert(one.sequence_id()).second) {
      Fail("the answer names a sequence that was not there, or twice, or as another tenant's");
      return;
    }
    counts_.moved += moved;
    counts_.refused += one.outcome() == v1::HAND_OVER_OUTCOME_REFUSED;
    counts_.kept += one.outcome() == v1::HAND_OVER_OUTCOME_KEPT;
    const auto now = texts_.find(one.sequence_id());
    if (now != texts_.end()) CheckText(now->first, &now->second);
    const bool here = now != texts_.end() && now->second.server == from;
    if (moved && here) Fail("the answer says moved of a sequence that is here");
    if (!moved && now != texts_.end() && now->second.server == 1 - from) {
      Fail("the answer says kept of a sequence that has moved");
    }
  }
  for (const auto& [id, text] : before) {
    const auto now = texts_.find(id);
    if (text.server == from && now != texts_.end() && now->second.server == from &&
        !named.contains(id)) {
      Fail("the answer does not name a sequence that is here");
    }
  }
  for (const auto& [stray, stays] : strays_) {
    if (stray.first == 1 - from && !stays && !failed()) {
      Fail("the peer was not told to forget a sequence that it may have");
    }
  }
}

void HandOverSimulator::Check() {
  for (auto& [id, text] : texts_) {
    if (!failed()) CheckText(id, &text);
  }
  for (int server = 0; server < 2 && !failed(); ++server) CheckStrays(server);
}

// Looks for a sequence as its client would.
void HandOverSimulator::CheckText(uint64_t id, Text* text) {
  if (failed()) return;
  SimServer& server = *servers_[static_cast<size_t>(text->server)];
  const auto list = server.engine().GetSequences({text->tenant, {id}, ""});
  if (list.sequences.empty()) return CheckMoved(id, text);
  const scheduler::SequenceInfo& info = list.sequences[0];
  if (info.epoch != text->epoch || info.length != static_cast<int64_t>(text->rows.size())) {
    Fail(absl::StrCat("a sequence of ", text->rows.size(), " rows has ", info.length));
  }
}

void HandOverSimulator::CheckMoved(uint64_t id, Text* text) {
  const int target = 1 - text->server;
  SimServer& here = *servers_[static_cast<size_t>(text->server)];
  SimServer& there = *servers_[static_cast<size_t>(target)];
  const auto told = here.engine().GetSequences({text->tenant, {id}, ""}).moved;
  if (told.empty()) return Fail("a sequence is lost");
  if (told[0].second != there.address()) return Fail("the wrong server is named");
  if (!acknowledged_.contains(id)) return Fail("a sequence has moved that its peer does not have");
  const auto list = there.engine().GetSequences({text->tenant, {id}, ""});
  if (list.sequences.empty()) {
    return Fail(absl::StrCat("a sequence that has moved is not there, as ", text->tenant, "'s"));
  }
  text->server = target;
  text->epoch = list.sequences[0].epoch;
  strays_.erase({target, id});
  CheckRows(id, *text);
}

void HandOverSimulator::CheckRows(uint64_t id, const Text& text) {
  SimServer& server = *servers_[static_cast<size_t>(text.server)];
  const auto list = server.engine().GetSequences({text.tenant, {id}, ""});
  if (list.sequences.empty()) return Fail("a sequence is lost");
  ++counts_.checked;
  const absl::Status same = server.CheckRows(text.tenant, list.sequences[0], text.rows);
  if (!same.ok()) Fail(absl::StrCat("rows differ: ", same.ToString()));
}

void HandOverSimulator::CheckStrays(int server) {
  for (const scheduler::TenantSequence& one :
       servers_[static_cast<size_t>(server)]->engine().AllSequences()) {
    const auto text = texts_.find(one.info.id);
    if (text != texts_.end() && text->second.server == server &&
        text->second.tenant == one.tenant) {
      continue;
    }
    if (!strays_.contains({server, one.info.id})) {
      return Fail("a server has a sequence that is elsewhere, or was released");
    }
  }
}

void HandOverSimulator::Finish() {
  while (!late_.empty() && !failed()) RunLate(0);
  for (const auto& [id, text] : texts_) {
    if (!failed()) CheckRows(id, text);
  }
  // No client renews them any more.
  clock_.Advance((scheduler::testing::TinyLimits().sequence_lease_ms + 1) * 1'000'000);
  for (const auto& server : servers_) {
    if (failed()) return;
    if (!server->engine().AllSequences().empty()) Fail("a sequence outlives its lease");
    if (server->engine().Stats().page_groups_used != 0) Fail("page groups are left");
    if (const std::string broken = server->engine().CheckInvariants(); !broken.empty()) {
      Fail(broken);
    }
  }
}

}  // namespace mla::simulation
