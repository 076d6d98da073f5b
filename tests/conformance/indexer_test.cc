// The choice of rows by an indexer against an oracle of its own in fp64: reference, and every CPU
// level. The oracle reads index keys as docs/sparse.md draws them, byte by byte.
//
// The chosen set must be the oracle's where the k-th and the (k + 1)-th logit are further apart
// than 2^-8 of the largest; elsewhere every chosen logit must come that close to the k-th. Of keys
// with equal bytes, the lower positions are chosen first.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/emulation/emulated_levels.h"
#include "kernels/reference/reference_backend.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;
using kernels::Bf16;
using kernels::DType;

constexpr int32_t kMostPositions = 1500;
constexpr int32_t kMostTopK = 256;
constexpr int64_t kPlaneOffset = 48;  // of index keys in a page group
constexpr size_t kReads = 4096;
constexpr double kGap = 1.0 / 256;

struct Case {
  uint64_t seed = 0;
  int32_t heads = 64, dim = 128, page_size = 64, positions = 1000, rows = 1, top_k = 64;
  DType dtype = DType::kBf16;
  bool many_equal = false;  // keys take few different values
};

struct Subject {
  std::string name;
  std::unique_ptr<AttentionBackend> backend;
};

std::vector<Subject> Subjects() {
  std::vector<Subject> subjects;
  subjects.push_back({"reference", std::make_unique<kernels::ReferenceBackend>()});
  int32_t threads = 2;  // fewer and more than the rows of a launch
  const auto add = [&](const kernels::cpu::KernelSet& level) {
    kernels::BackendOptions options;
    options.threads = threads;
    options.pin_threads = false;
    options.spin_us = 0;
    threads = threads % 5 + 2;
    auto made = kernels::CpuBackend::CreateWith(level, options);
    ASSERT_TRUE(made.ok());
    subjects.push_back({level.name, *std::move(made)});
  };
  for (const kernels::cpu::KernelSet* level : kernels::cpu::UsableLevels()) add(*level);
  add(kernels::cpu::kEmulatedAmxKernels);
  add(kernels::cpu::kEmulatedAvx512Bf16Kernels);
  for (Subject& subject : subjects) {
    kernels::BackendLimits limits;
    limits.kv_pool_bytes = 16 << 20;
    limits.page_table_entries = kMostPositions;
    limits.launch_slots = 1;
    limits.launch_requests = 4;
    limits.launch_rows = 64;
    limits.max_top_k = kMostTopK;
    limits.max_o_dim = 16;
    limits.partial_rows = 16;
    limits.max_geometry = {1, 16, 0, 0, 0};
    EXPECT_TRUE(subject.backend->Configure(limits).ok());
  }
  return subjects;
}

// e4m3fn as its definition has it.
double Decode(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double sign = (code & 0x80) != 0 ? -1 : 1;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8 + mantissa, exponent - 10);
}

// A tensor as it travels: fp32, or bf16.
std::vector<std::byte> Encode(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * kernels::ElementSize(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const Bf16 narrow = kernels::ToBf16(values[i]);
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[i * 4], &values[i], 4);
    } else {
      std::memcpy(&bytes[i * 2], &narrow, 2);
    }
  }
  return bytes;
}

double At(const std::vector<float>& values, size_t i, DType dtype) {
  return dtype == DType::kF32 ? values[i] : kernels::ToFloat(kernels::ToBf16(values[i]));
}

class Workload {
 public:
  explicit Workload(const Case& c) : c_(c), random_(c.seed), logits_(static_cast<size_t>(c.rows)) {
    const int32_t pages = (c.positions + c.page_size - 1) / c.page_size;
    page_bytes_ = (int64_t{c.page_size} * (c.dim + 4) + 15) / 16 * 16;
    group_granules_ = (kPlaneOffset + page_bytes_ + 255) / 256;
    table_.resize(static_cast<size_t>(pages));
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), random_);
    for (uint32_t& page : table_) page = page * static_cast<uint32_t>(group_granules_);
    // Of very different sizes, so that a scale that is not the row's own changes the order.
    std::normal_distribution<float> normal;
    const int32_t different = c.many_equal ? 7 : c.positions;
    std::vector<float> distinct(static_cast<size_t>(different) * c.dim);
    for (int32_t row = 0; row < different; ++row) {
      const float size = std::ldexp(1.0f, static_cast<int>(random_() % 7) - 3);
      for (int32_t i = 0; i < c.dim; ++i) {
        distinct[static_cast<size_t>(row) * c.dim + i] = size * normal(random_);
      }
    }
    for (int32_t position = 0; position < c.positions; ++position) {
      const size_t row = c.many_equal ? random_() % different : static_cast<size_t>(position);
      keys_.insert(keys_.end(), &distinct[row * c.dim], &distinct[row * c.dim] + c.dim);
    }
    queries_.resize(static_cast<size_t>(c.rows) * c.heads * c.dim);
    weights_.resize(static_cast<size_t>(c.rows) * c.heads);
    for (float& value : queries_) value = normal(random_);
    for (float& value : weights_) value = normal(random_);
    sent_keys_ = Encode(keys_, c.dtype);
    const std::vector<std::byte> queries = Encode(queries_, c.dtype);
    const size_t query_bytes = queries.size() / c.rows, weight_bytes = size_t{4} * c.heads;
    for (int32_t row = 0; row < c.rows; ++row) {
      inputs_.insert(inputs_.end(), &queries[row * query_bytes],
                     &queries[row * query_bytes] + query_bytes);
      const auto* const weights =
          reinterpret_cast<const std::byte*>(&weights_[static_cast<size_t>(row) * c.heads]);
      inputs_.insert(inputs_.end(), weights, weights + weight_bytes);
    }
  }

  int32_t Visible(int32_t row) const { return c_.positions - c_.rows + row + 1; }
  int32_t Wanted(int32_t row) const { return std::min(Visible(row), c_.top_k); }

  // Lists by row, as the backend chose them in one launch with the rows [first, first + rows).
  std::vector<std::vector<int32_t>> Run(AttentionBackend& backend, int32_t first, int32_t rows) {
    kernels::AppendRecord append{};
    append.kv = sent_keys_.data();
    append.dtype = c_.dtype;
    append.kv_row_stride = c_.dim;
    append.layer_offset = kPlaneOffset;
    append.row_stride = c_.dim;
    append.page_size = c_.page_size;
    append.rows = c_.positions;
    append.row_dim = c_.dim;
    append.format = kernels::KvFormat::kIndexKey;
    std::vector<int32_t> begin = {5};
    for (int32_t row = first; row < first + rows; ++row)
      begin.push_back(begin.back() + Wanted(row));
    std::vector<int32_t> list(static_cast<size_t>(begin.back() - 5), -7);
    std::vector<int32_t> wanted(static_cast<size_t>(rows) * c_.top_k, -7);
    kernels::SelectRecord select{};
    select.indexer = {c_.heads, c_.dim};
    select.inputs = inputs_.data() + first * select.indexer.input_bytes(c_.dtype);
    select.dtype = c_.dtype;
    select.layer_offset = kPlaneOffset;
    select.row_stride = c_.dim;
    select.page_size = c_.page_size;
    select.rows = rows;
    select.kv_rows = Visible(first + rows - 1);
    select.list = list.data();
    select.list_begin = begin.data();
    select.wanted = wanted.data();
    select.wanted_width = c_.top_k;
    kernels::Launch launch;
    launch.page_tables = table_;
    launch.appends = {&append, 1};
    launch.selects = {&select, 1};
    EXPECT_TRUE(backend.Submit(0, launch).ok());
    EXPECT_TRUE(backend.Wait(0).ok());
    CheckPages(backend);
    std::vector<std::vector<int32_t>> lists;
    for (int32_t row = 0; row < rows; ++row) {
      lists.emplace_back(list.begin() + (begin[row] - 5), list.begin() + (begin[row + 1] - 5));
      std::vector<int32_t> filled = lists.back();
      filled.resize(static_cast<size_t>(c_.top_k), -1);
      const auto at = wanted.begin() + int64_t{row} * c_.top_k;
      EXPECT_TRUE(std::equal(filled.begin(), filled.end(), at)) << "the list as it is returned";
    }
    return lists;
  }

  void Check(int32_t row, const std::vector<int32_t>& list) {
    const int32_t visible = Visible(row), wanted = Wanted(row);
    ASSERT_EQ(list.size(), static_cast<size_t>(wanted));
    ASSERT_TRUE(std::is_sorted(list.begin(), list.end()));
    ASSERT_TRUE(std::adjacent_find(list.begin(), list.end()) == list.end());
    ASSERT_GE(list.front(), 0);
    ASSERT_LT(list.back(), visible);
    if (wanted == visible) return;
    std::vector<double>& logits = logits_[static_cast<size_t>(row)];
    for (auto position = static_cast<int32_t>(logits.size()); position < visible; ++position) {
      logits.push_back(Logit(row, position));
    }
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    double largest = 0;
    for (const double logit : logits) largest = std::max(largest, std::abs(logit));
    const double threshold = logits[order[wanted - 1]], next = logits[order[wanted]];
    std::vector<int32_t> best(order.begin(), order.begin() + wanted);
    std::sort(best.begin(), best.end());
    // Equal keys have equal logits whatever rounds, so few different keys are chosen exactly.
    if (threshold - next > kGap * largest || c_.many_equal) {
      ASSERT_EQ(list, best);
    }
    for (const int32_t position : list) {
      ASSERT_GE(logits[position], threshold - kGap * largest) << "position " << position;
    }
  }

  // What lies in the pages stands for what was sent, to e4m3's accuracy.
  void CheckKeys() const {
    for (int32_t position = 0; position < c_.positions; ++position) {
      double largest = 0;
      for (int32_t i = 0; i < c_.dim; ++i) {
        largest = std::max(largest, std::abs(double{keys_[size_t(position) * c_.dim + i]}));
      }
      for (int32_t i = 0; i < c_.dim; ++i) {
        const double sent = At(keys_, static_cast<size_t>(position) * c_.dim + i, c_.dtype);
        ASSERT_NEAR(Key(position, i), sent, std::abs(sent) / 16 + largest / 32768);
      }
    }
  }

 private:
  // Every backend stores the same bytes, of which those of the first are decoded.
  void CheckPages(AttentionBackend& backend) {
    std::vector<std::byte> pages(table_.size() * static_cast<size_t>(page_bytes_));
    std::vector<kernels::PageTransfer> reads;
    for (size_t page = 0; page < table_.size(); ++page) {
      reads.push_back({int64_t{table_[page]} * 256 + kPlaneOffset, page_bytes_,
                       &pages[page * static_cast<size_t>(page_bytes_)]});
    }
    for (size_t done = 0; done < reads.size(); done += kReads) {
      kernels::Launch launch;
      launch.page_reads = std::span(reads).subspan(done, std::min(kReads, reads.size() - done));
      EXPECT_TRUE(backend.Submit(0, launch).ok());
      EXPECT_TRUE(backend.Wait(0).ok());
    }
    if (stored_.empty()) {
      for (int32_t position = 0; position < c_.positions; ++position) {
        for (int32_t i = 0; i < c_.dim; ++i) stored_.push_back(Stored(pages, position, i));
      }
      return;
    }
    for (int32_t position = 0; position < c_.positions; ++position) {
      for (int32_t i = 0; i < c_.dim; ++i) {
        ASSERT_EQ(Stored(pages, position, i), Key(position, i)) << position;
      }
    }
  }

  double Stored(const std::vector<std::byte>& pages, int32_t position, int32_t i) const {
    const std::byte* const page = &pages[size_t(position / c_.page_size) * page_bytes_];
    const int64_t in_page = position % c_.page_size;
    float scale = 0;
    std::memcpy(&scale, page + int64_t{c_.page_size} * c_.dim + in_page * 4, 4);
    return Decode(std::to_integer<uint8_t>(page[in_page * c_.dim + i])) * scale;
  }
  double Key(int32_t position, int32_t i) const {
    return stored_[static_cast<size_t>(position) * c_.dim + i];
  }

  double Logit(int32_t row, int32_t position) const {
    double logit = 0;
    for (int32_t head = 0; head < c_.heads; ++head) {
      const size_t packed = static_cast<size_t>(row) * c_.heads + head;
      double dot = 0;
      for (int32_t i = 0; i < c_.dim; ++i) {
        dot += At(queries_, packed * c_.dim + i, c_.dtype) * Key(position, i);
      }
      logit += weights_[packed] * std::max(dot, 0.0);
    }
    return logit;
  }

  const Case c_;
  std::mt19937_64 random_;
  int64_t page_bytes_ = 0, group_granules_ = 0;
  std::vector<uint32_t> table_;
  std::vector<float> keys_, queries_, weights_;
  std::vector<std::byte> sent_keys_, inputs_;
  std::vector<double> stored_;               // keys as the pages have them
  std::vector<std::vector<double>> logits_;  // by row
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  std::mt19937_64 random(7);
  const auto pick = [&](std::vector<int32_t> of) { return of[random() % of.size()]; };
  for (uint64_t i = 0; i < 60; ++i) {
    Case c;
    c.seed = i + 1;
    c.heads = pick({64, 64, 32, 1, 17, 128});
    c.dim = pick({128, 128, 64, 40, 3});
    c.page_size = pick({1, 4, 64, 7});
    c.rows = pick({1, 2, 3, 6});
    c.top_k = pick({1, 16, 100, 128, kMostTopK});
    c.positions =
        c.rows + static_cast<int32_t>(random() % (i % 4 == 0 ? kMostPositions - 10 : 400));
    c.dtype = random() % 2 == 0 ? DType::kBf16 : DType::kF32;
    c.many_equal = i % 5 == 0;
    cases.push_back(c);
  }
  return cases;
}

TEST(IndexerTest, ChoosesTheBestOfWhatARowSees) {
  std::vector<Subject> subjects = Subjects();
  ASSERT_GT(subjects.size(), 3u);
  for (const Case& c : Cases()) {
    Workload workload(c);
    for (Subject& subject : subjects) {
      SCOPED_TRACE(subject.name + " seed " + std::to_string(c.seed) + " positions " +
                   std::to_string(c.positions) + " top_k " + std::to_string(c.top_k) + " dim " +
                   std::to_string(c.dim) + " heads " + std::to_string(c.heads));
      const auto lists = workload.Run(*subject.backend, 0, c.rows);
      workload.CheckKeys();
      for (int32_t row = 0; row < c.rows && !testing::Test::HasFatalFailure(); ++row) {
        workload.Check(row, lists[static_cast<size_t>(row)]);
        // A row alone gets the same list as in company.
        EXPECT_EQ(workload.Run(*subject.backend, row, 1)[0], lists[static_cast<size_t>(row)]);
      }
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Logits that are not numbers, and zeros of either sign.
TEST(IndexerTest, NaNIsTheLargestAndZerosAreEqual) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> falling = {nan, inf, 2.0f, 1e-40f, 0.0f, -1e-40f, -2.0f, -inf};
  for (size_t i = 0; i + 1 < falling.size(); ++i) {
    EXPECT_GT(kernels::SelectRank(falling[i], 1 << 30), kernels::SelectRank(falling[i + 1], 0));
  }
  EXPECT_EQ(kernels::SelectRank(-0.0f, 3), kernels::SelectRank(0.0f, 3));
  EXPECT_EQ(kernels::SelectRank(-nan, 3), kernels::SelectRank(nan, 3));
  EXPECT_GT(kernels::SelectRank(1.0f, 3), kernels::SelectRank(1.0f, 4));
  EXPECT_EQ(kernels::SelectPosition(kernels::SelectRank(-7.0f, 123456)), 123456);
}

}  // namespace
}  // namespace mla::conformance
