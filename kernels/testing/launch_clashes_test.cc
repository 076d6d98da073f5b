#include "kernels/testing/launch_clashes.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels::testing {
namespace {

// A launch over groups of 256 bytes, each a page of four rows of 64 bytes.
class LaunchClashesTest : public ::testing::Test {
 protected:
  LaunchClashesTest() { launch_.page_tables = tables_; }

  void MoveIn(int64_t offset, int64_t bytes) {
    writes_.push_back({offset, bytes, nullptr});
    launch_.page_writes = writes_;
  }
  void MoveOut(int64_t offset, int64_t bytes) {
    reads_.push_back({offset, bytes, nullptr});
    launch_.page_reads = reads_;
  }
  void Work(const PageRange& range) {
    pages_.push_back(range);
    launch_.pages = pages_;
  }
  void Append(int32_t first, int32_t rows) {
    AppendRecord record = {};
    record.page_table = 1;
    record.row_stride = 64;
    record.page_size = 4;
    record.first_position = first;
    record.rows = rows;
    appends_.push_back(record);
    launch_.appends = appends_;
  }

  const std::vector<uint32_t> tables_ = {9, 3, 5};
  std::vector<PageTransfer> writes_, reads_;
  std::vector<PageRange> pages_;
  std::vector<AppendRecord> appends_;
  std::vector<SegmentRecord> segments_;
  Launch launch_;
};

TEST_F(LaunchClashesTest, PagesApartDoNot) {
  MoveIn(256, 256);
  MoveOut(512, 256);
  Work({.target_offset = 0, .bytes = 256});
  Work({.target_offset = 768, .bytes = 64, .source_offset = 1024, .count = 2, .stride = 128});
  Append(4, 1);
  EXPECT_EQ(LaunchClash(launch_), "");
}

TEST_F(LaunchClashesTest, RowsIntoWhatIsZeroed) {
  MoveIn(256, 256);
  Work({.target_offset = 448, .bytes = 128});
  EXPECT_EQ(LaunchClash(launch_), "a launch moves rows into a page that its page work fills");
}

TEST_F(LaunchClashesTest, RowsIntoWhatIsCopied) {
  MoveIn(256, 256);
  Work({.target_offset = 1024, .bytes = 64, .source_offset = 192, .count = 2, .stride = 128});
  EXPECT_EQ(LaunchClash(launch_), "a launch moves rows into a page that its page work copies");
}

TEST_F(LaunchClashesTest, RowsWhereOthersAreAppended) {
  MoveIn(5 * 256 + 64, 64);
  Append(3, 2);  // the last row of the first page, and the first row of the second
  EXPECT_EQ(LaunchClash(launch_), "");
  Append(5, 1);
  EXPECT_EQ(LaunchClash(launch_), "a launch moves rows to where it appends some");
}

TEST_F(LaunchClashesTest, RowsThatAreAttendedTo) {
  MoveIn(5 * 256 + 64, 64);
  SegmentRecord record = {};
  record.page_table = 1;
  record.row_stride = 64;
  record.page_size = 4;
  record.q_rows = 1;
  record.kv_rows = 5;
  segments_ = {record};
  launch_.absorbed.segments = segments_;
  EXPECT_EQ(LaunchClash(launch_), "");
  segments_[0].kv_rows = 6;
  EXPECT_EQ(LaunchClash(launch_), "a launch attends to rows that it moves in");
}

TEST_F(LaunchClashesTest, RowsThatLeave) {
  MoveOut(256, 256);
  MoveIn(1024, 64);
  EXPECT_EQ(LaunchClash(launch_), "");
  MoveIn(448, 64);
  EXPECT_EQ(LaunchClash(launch_), "a launch moves rows in and out at one place");
  writes_.clear();
  launch_.page_writes = writes_;
  Work({.target_offset = 0, .bytes = 512});
  EXPECT_EQ(LaunchClash(launch_), "a launch moves rows out of a page that its page work fills");
  pages_.clear();
  launch_.pages = pages_;
  Append(0, 1);
  EXPECT_EQ(LaunchClash(launch_), "");
  MoveOut(3 * 256, 64);
  EXPECT_EQ(LaunchClash(launch_), "a launch moves rows out that it appends");
}

}  // namespace
}  // namespace mla::kernels::testing
