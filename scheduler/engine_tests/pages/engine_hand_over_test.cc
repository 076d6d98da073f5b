// Sequences that go to another server while the engine drains.
#include <cstddef>
#include <string>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

using EngineHandOverTest = testing::EngineCoreTest;

TEST_F(EngineHandOverTest, ASequenceThatWasHandedOverIsGoneAndSaysWhereItIs) {
  const SequenceInfo source = h_.Open();
  Fill(source, 4, 50);
  h_.core().draining().Start("peer:1");
  std::vector<SequenceInfo> all = h_.core().transfers().AllSequences();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].tenant, h_.tenant());
  const auto exported = h_.core().transfers().BeginExport(
      {h_.tenant(), source.id, source.epoch, 0, {}, /*in_place=*/true});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(exported->id, source.id);
  EXPECT_EQ(h_.core().Stats().sequences, 1);  // no fork holds it
  // The sequence has changed since its export.
  SequenceInfo other = all[0];
  ++other.length;
  EXPECT_EQ(DetailOf(h_.core().transfers().EndHandOver(other, "peer:1")).reason,
            "changed_meanwhile");
  other = all[0];
  ++other.epoch;
  EXPECT_EQ(DetailOf(h_.core().transfers().EndHandOver(other, "peer:1")).reason, "epoch_mismatch");
  ASSERT_TRUE(h_.core().sequences().Truncate(h_.tenant(), source.id, 3, source.epoch).ok());
  std::vector<std::byte> bytes(8);
  PageMove cut;
  cut.tenant = h_.tenant();
  cut.id = exported->id;
  cut.page = 1;  // of three rows; one of them has gone
  cut.rows = 1;
  cut.bytes = bytes;
  EXPECT_EQ(DetailOf(h_.core().transfers().Start(&cut)).reason, "changed_meanwhile");
  EXPECT_FALSE(h_.core().transfers().EndHandOver(all[0], "peer:1").ok());
  all = h_.core().transfers().AllSequences();
  EXPECT_EQ(h_.core().transfers().EndHandOver(all[0], "peer:1"), absl::OkStatus());
  EXPECT_EQ(h_.core().Stats().page_groups_used, 0);
  auto begin = h_.Begin(stream_, 9, {{source.id, source.epoch, 3, 1}});
  ExpectCode(*begin, absl::StatusCode::kNotFound, "moved");
  EXPECT_EQ(begin->detail.peer, "peer:1");
  begin = h_.Begin(stream_, 9, {{12345, 1, 0, 1}});
  ExpectCode(*begin, absl::StatusCode::kUnavailable, "draining");
  EXPECT_EQ(begin->detail.peer, "");
  // Others learn nothing of it.
  EXPECT_TRUE(h_.core().sequences().Get({"stranger", {source.id}, ""}).moved.empty());
  EXPECT_EQ(h_.core().sequences().Get({h_.tenant(), {source.id}, ""}).moved.size(), 1u);
}

// A client that names a sequence before it has moved must not look for it at the peer; a new one
// may be opened there at once.
TEST_F(EngineHandOverTest, ThePeerIsNamedForWhatIsThere) {
  const SequenceInfo source = h_.Open();
  Fill(source, 4, 50);
  h_.core().draining().Start("peer:1");
  auto begin = h_.Begin(stream_, 9, {{source.id, source.epoch, 4, 1}});
  ExpectCode(*begin, absl::StatusCode::kUnavailable, "draining");
  EXPECT_EQ(begin->detail.peer, "");
  EXPECT_EQ(begin->detail.retry_after_ms, kMovingRetryMs);
  ForkArgs fork;
  fork.tenant = h_.tenant();
  fork.parent = source.id;
  fork.expected_epoch = source.epoch;
  const auto fork_detail = [&] { return DetailOf(h_.core().sequences().Fork(fork).status()); };
  EXPECT_EQ(fork_detail().reason, "draining");
  EXPECT_EQ(fork_detail().peer, "");
  OpenArgs open;
  open.tenant = h_.tenant();
  const auto opened = DetailOf(h_.core().sequences().Open(open, {}).status());
  EXPECT_EQ(opened.reason, "draining");
  EXPECT_EQ(opened.peer, "peer:1");
  ASSERT_TRUE(
      h_.core().transfers().EndHandOver(h_.core().transfers().AllSequences()[0], "peer:1").ok());
  EXPECT_EQ(fork_detail().reason, "moved");
  EXPECT_EQ(fork_detail().peer, "peer:1");
}

// The latest of them are remembered, as many as may be open.
TEST_F(EngineHandOverTest, WhereSequencesAreIsBounded) {
  const size_t limit = static_cast<size_t>(h_.core().limits().max_sequences);
  h_.core().draining().Start("peer:1");
  std::vector<SequenceId> moved;
  for (size_t i = 0; i < limit + 2; ++i) {
    h_.core().draining().Cancel();
    moved.push_back(h_.Open().id);
    h_.core().draining().Start("peer:1");
    const std::vector<SequenceInfo> all = h_.core().transfers().AllSequences();
    ASSERT_EQ(all.size(), 1u);
    ASSERT_EQ(h_.core().transfers().EndHandOver(all[0], "peer:1"), absl::OkStatus());
  }
  EXPECT_EQ(h_.core().sequences().Get({h_.tenant(), moved, ""}).moved.size(), limit);
  EXPECT_EQ(h_.core().sequences().Get({h_.tenant(), {moved[1]}, ""}).moved.size(), 0u);
  EXPECT_EQ(h_.core().sequences().Get({h_.tenant(), {moved[2]}, ""}).moved.size(), 1u);
}

}  // namespace
}  // namespace mla::scheduler
