#include "tests/bench/gpu/peers/peer_times.h"

#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace mla::bench {
namespace {

TEST(PeerTimesTest, TakesTheFastestPeerOfAShape) {
  const auto times =
      PeerTimes::Parse(R"({"peer": "a", "shape": "h=16 b=1 ctx=1024", "us": 15.9, "err": 0.001})"
                       "\n\n"
                       R"({"peer": "b", "shape": "h=16 b=1 ctx=1024", "us": 12})"
                       "\r\n"
                       R"({"peer": "c", "shape": "h=16 b=1 ctx=1024", "us": 12.5})"
                       "\n"
                       R"({"peer": "c", "shape": "h=128 b=1 ctx=1024", "us": 17.4})");
  ASSERT_TRUE(times.ok()) << times.status();
  ASSERT_NE(times->Best("h=16 b=1 ctx=1024"), nullptr);
  EXPECT_EQ(times->Best("h=16 b=1 ctx=1024")->peer, "b");
  EXPECT_EQ(times->Best("h=16 b=1 ctx=1024")->us, 12);
  EXPECT_EQ(times->Best("h=128 b=1 ctx=1024")->peer, "c");
  EXPECT_EQ(times->Best("h=128 b=2 ctx=1024"), nullptr);
  EXPECT_FALSE(times->empty());
  EXPECT_TRUE(PeerTimes::Parse("\n \n")->empty());
}

TEST(PeerTimesTest, NamesTheLineAndTheFieldOfAFault) {
  const auto message = [](const std::string& line) {
    const auto times = PeerTimes::Parse("\n" + line + "\n");
    EXPECT_EQ(times.status().code(), absl::StatusCode::kInvalidArgument) << line;
    return std::string(times.status().message());
  };
  EXPECT_EQ(message("{"), "line 2: want a JSON object");
  EXPECT_EQ(message("[]"), "line 2: want a JSON object");
  EXPECT_EQ(message(R"({"shape": "s", "us": 1})"), "line 2: peer: want a text that is not empty");
  EXPECT_EQ(message(R"({"peer": "", "shape": "s", "us": 1})"),
            "line 2: peer: want a text that is not empty");
  EXPECT_EQ(message(R"({"peer": "p", "shape": 7, "us": 1})"),
            "line 2: shape: want a text that is not empty");
  EXPECT_EQ(message(R"({"peer": "p", "shape": "s"})"), "line 2: us: want a number");
  EXPECT_EQ(message(R"({"peer": "p", "shape": "s", "us": "1"})"), "line 2: us: want a number");
  EXPECT_EQ(message(R"({"peer": "p", "shape": "s", "us": 0})"),
            "line 2: us: want a number above 0");
  EXPECT_EQ(message(R"({"peer": "p", "shape": "s", "us": -3})"),
            "line 2: us: want a number above 0");
}

TEST(PeerTimesTest, FieldsForAReportAreJson) {
  EXPECT_EQ((PeerTime{"flash\"mla", 15.94}.JsonFields(12.0)),
            R"("peer": "flash\"mla", "peer_us": 15.9, "of_peer": 1.328)");
}

TEST(PeerTimesTest, ReadsFilesUpToALimit) {
  const std::string path = ::testing::TempDir() + "peer_times";
  EXPECT_EQ(PeerTimes::Read(path + "_that_is_not_there").status().code(),
            absl::StatusCode::kNotFound);
  std::ofstream(path) << R"({"peer": "p", "shape": "s", "us": 2})";
  EXPECT_EQ(PeerTimes::Read(path)->Best("s")->us, 2);
  std::ofstream(path) << "no row";
  EXPECT_EQ(PeerTimes::Read(path).status().message(),
            "--peers: " + path + ": line 1: want a JSON object");
  std::ofstream(path) << std::string(PeerTimes::kMostBytes, '\n');
  EXPECT_TRUE(PeerTimes::Read(path).ok());
  std::ofstream(path) << std::string(PeerTimes::kMostBytes + 1, '\n');
  EXPECT_EQ(PeerTimes::Read(path).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(PeerRatiosTest, SummaryNamesTheSlowestShape) {
  PeerRatios ratios;
  EXPECT_EQ(ratios.Summary(), "no shape with a peer");
  ratios.Add("first", 2.0);
  EXPECT_EQ(ratios.Summary(),
            "1 shape with a peer: ratio 2.00 (first) to 2.00, geometric mean 2.00, 0 below 1.00");
  ratios.Add("second", 0.5);
  ratios.Add("third", 1.0);
  EXPECT_EQ(ratios.Summary(),
            "3 shapes with a peer: ratio 0.50 (second) to 2.00, geometric mean 1.00, 1 below 1.00");
}

}  // namespace
}  // namespace mla::bench
