#include "tests/conformance/sparse/indexer_cases.h"

#include <cstdio>
#include <random>
#include <string>

#include "kernels/reference/reference_backend.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;
using kernels::DType;

constexpr int32_t kMostPositions = 1500;
constexpr int32_t kLongPositions = 9500;
constexpr int32_t kMostTopK = 256;  // for drawn cases

}  // namespace

std::vector<IndexerCase> IndexerCases(int32_t count, const std::vector<int32_t>& dims) {
  std::vector<IndexerCase> cases;
  std::mt19937_64 random(7);
  const auto pick = [&](const std::vector<int32_t>& of) { return of[random() % of.size()]; };
  for (int32_t i = 0; i < count; ++i) {
    IndexerCase c;
    c.seed = static_cast<uint64_t>(i) + 1;
    c.heads = pick({64, 64, 32, 1, 17, 128});
    c.dim = pick(dims);
    c.page_size = pick({1, 4, 64, 7, 64, 192});
    c.rows = pick({1, 2, 3, 6});
    c.top_k = pick({1, 16, 100, 128, kMostTopK});
    c.positions =
        c.rows + static_cast<int32_t>(random() % (i % 4 == 0 ? kMostPositions - 10 : 400));
    c.dtype = random() % 2 == 0 ? DType::kBf16 : DType::kF32;
    c.distinct = i % 5 == 0 ? 7 : 0;
    cases.push_back(c);
  }
  return cases;
}

std::vector<IndexerCase> LongIndexerCases() {
  std::vector<IndexerCase> cases;
  for (int32_t i = 0; i < 4; ++i) {
    IndexerCase c;
    c.seed = static_cast<uint64_t>(i) + 101;
    c.positions = kLongPositions + i;
    c.heads = i % 2 == 0 ? 8 : 1;
    c.top_k = i % 2 == 0 ? kMostTopK : 100;
    c.distinct = i < 2 ? i + 1 : 0;
    c.alike = i == 2;
    cases.push_back(c);
  }
  for (int32_t i = 0; i < 3; ++i) {
    IndexerCase c;
    c.seed = static_cast<uint64_t>(i) + 111;
    c.top_k = IndexerCase::kMostTopK;
    c.heads = 8;
    // Cases: logits that differ; equal logits for all positions; and rows that see one position too
    // few, exactly enough, and one too many.
    c.positions = i < 2 ? kLongPositions - 8 + i : IndexerCase::kMostTopK + 1;
    c.rows = i < 2 ? 1 : 3;
    c.distinct = i == 1 ? 1 : 0;
    cases.push_back(c);
  }
  return cases;
}

IndexerCase ManyRowsIndexerCase() {
  IndexerCase c;
  c.seed = 121;
  c.positions = kLongPositions;
  c.rows = 40;
  c.heads = 8;
  return c;
}

std::vector<IndexerCase> DirectedIndexerCases() {
  return {
      {.seed = 131, .heads = 8, .page_size = 192, .positions = 1100, .rows = 8, .top_k = 100},
      {.seed = 132, .heads = 8, .positions = 300, .rows = 40, .top_k = 16},
      {.seed = 133, .heads = 8, .positions = 1100, .rows = 2, .top_k = 100, .distinct = 7},
      {.seed = 134,
       .heads = 17,
       .page_size = 7,
       .positions = 333,
       .rows = 3,
       .top_k = 100,
       .dtype = DType::kF32,
       .distinct = 50},
      {.seed = 135, .heads = 1, .positions = 65, .rows = 1, .top_k = 33},
  };
}

std::vector<IndexerPair> IndexerPairs() {
  const IndexerCase large{
      .seed = 141, .heads = 8, .page_size = 64, .positions = 700, .rows = 3, .top_k = 100};
  const IndexerCase odd{.seed = 142,
                        .heads = 17,
                        .page_size = 7,
                        .positions = 333,
                        .rows = 2,
                        .top_k = 64,
                        .dtype = DType::kF32};
  return {{large, odd}, {odd, large}};
}

absl::Status CheckIndexer(AttentionBackend& reference, AttentionBackend& backend,
                          const IndexerCase& c) {
  IndexerWorkload workload(c);
  absl::Status s = workload.Run(reference, 0, c.rows).status();
  return s.ok() ? workload.Check(backend) : s;
}

absl::Status CheckIndexer(AttentionBackend& reference, AttentionBackend& backend,
                          const IndexerPair& pair) {
  IndexerWorkload first(pair.first), second(pair.second, &first);
  for (const absl::Status& s : {first.Run(reference, 0, pair.first.rows).status(),
                                second.Run(reference, 0, pair.second.rows).status(),
                                first.Check(backend), second.Check(backend)}) {
    if (!s.ok()) return s;
  }
  return first.CheckWith(backend, second);
}

absl::StatusOr<int64_t> RunDirectedIndexers(AttentionBackend& backend) {
  kernels::ReferenceBackend reference;
  for (AttentionBackend* const each : {static_cast<AttentionBackend*>(&reference), &backend}) {
    if (absl::Status s = each->Configure(IndexerLimits()); !s.ok()) return s;
  }
  const auto failed = [](const absl::Status& s, const std::string& what) {
    if (!s.ok()) std::printf("FAIL %s: %s\n", what.c_str(), s.ToString().c_str());
    return !s.ok();
  };
  for (const IndexerCase& c : DirectedIndexerCases()) {
    if (failed(CheckIndexer(reference, backend, c), ToString(c))) return 1;
  }
  for (const IndexerPair& pair : IndexerPairs()) {
    if (failed(CheckIndexer(reference, backend, pair), "with others, " + ToString(pair.first))) {
      return 1;
    }
  }
  return 0;
}

}  // namespace mla::conformance
