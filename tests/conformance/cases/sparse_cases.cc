#include "tests/conformance/cases/sparse_cases.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace mla::conformance {
namespace {

int32_t Visible(const RequestSpec& request, int32_t row) {
  return request.causal ? request.cached_rows + row + 1 : request.kv_rows();
}

// `count` different positions below `bound`, in random order.
std::vector<int32_t> Positions(Random& random, int32_t bound, int32_t count) {
  std::vector<int32_t> all(static_cast<size_t>(bound));
  std::iota(all.begin(), all.end(), 0);
  for (int32_t i = 0; i < count; ++i) {
    std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(i + random.Below(bound - i))]);
  }
  all.resize(static_cast<size_t>(count));
  return all;
}

// A value for a place of a list that is not a position that the row sees.
int32_t NoPosition(Random& random, const RequestSpec& request, int32_t visible) {
  if (request.lists != ListKind::kOutside) return -1;
  const std::vector<int32_t> outside = {visible,   request.kv_rows(), visible + 1000,
                                        INT32_MAX, INT32_MIN,         -2};
  return random.Pick(outside);
}

std::vector<int32_t> MakeList(Random& random, const RequestSpec& request, int32_t row) {
  const int32_t visible = Visible(request, row);
  if (request.lists == ListKind::kEmpty || visible == 0) {
    return std::vector<int32_t>(static_cast<size_t>(random.Below(3)), -1);
  }
  // Lengths around the borders of tiles, and others.
  const std::vector<int32_t> lengths = {1, 31, 32, 33, 127, 128, 129, 300, visible};
  int32_t length = random.OneIn(3) ? static_cast<int32_t>(1 + random.Below(visible))
                                   : std::min(visible, random.Pick(lengths));
  if (request.lists == ListKind::kOne) length = 1;
  std::vector<int32_t> list = Positions(random, visible, length);
  if (request.lists == ListKind::kSorted) std::sort(list.begin(), list.end());
  if (request.lists == ListKind::kTwice) {
    const std::vector<int32_t> once = list;
    for (const int32_t position : once) {
      list.insert(list.begin() + random.Below(static_cast<int64_t>(list.size()) + 1), position);
    }
  }
  if (request.lists != ListKind::kHoles && request.lists != ListKind::kOutside) return list;
  std::vector<int32_t> with_holes;
  for (const int32_t position : list) {
    while (random.OneIn(3)) with_holes.push_back(NoPosition(random, request, visible));
    with_holes.push_back(position);
  }
  // Sometimes whole tiles without a position follow.
  const int64_t behind = random.OneIn(3) ? 200 : random.Below(4);
  for (int64_t i = 0; i < behind; ++i) {
    with_holes.push_back(NoPosition(random, request, visible));
  }
  if (random.OneIn(2)) std::rotate(with_holes.begin(), with_holes.end() - behind, with_holes.end());
  return with_holes;
}

}  // namespace

IndexLists MakeLists(Random& random, const RequestSpec& request) {
  IndexLists lists;
  const auto first = static_cast<int32_t>(random.Below(5));  // begins as a part of a larger message
                                                             // does
  lists.begin.push_back(first);
  for (int32_t row = 0; row < request.q_rows; ++row) {
    const std::vector<int32_t> list = MakeList(random, request, row);
    lists.entries.insert(lists.entries.end(), list.begin(), list.end());
    lists.begin.push_back(first + static_cast<int32_t>(lists.entries.size()));
    lists.longest = std::max(lists.longest, static_cast<int32_t>(list.size()));
  }
  return lists;
}

std::vector<bool> RowsListed(const RequestSpec& request, const IndexLists& lists) {
  std::vector<bool> listed(static_cast<size_t>(request.kv_rows()), false);
  for (int32_t row = 0; row < request.q_rows; ++row) {
    for (int32_t i = lists.begin[static_cast<size_t>(row)];
         i < lists.begin[static_cast<size_t>(row) + 1]; ++i) {
      const int32_t position = lists.entries[static_cast<size_t>(i - lists.begin[0])];
      if (position >= 0 && position < Visible(request, row)) {
        listed[static_cast<size_t>(position)] = true;
      }
    }
  }
  return listed;
}

std::vector<CaseSpec> SparseCases(const SamplerOptions& options, uint64_t first, int64_t count) {
  SamplerOptions sampler = options;
  sampler.expanded = false;  // sparse attention does not take this form
  const std::vector<int32_t> q_rows = {1, 1, 2, 3, 6, 7, 17};
  const std::vector<int32_t> heads = {8, 20, 64};
  std::vector<CaseSpec> cases;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t index = first + static_cast<uint64_t>(i);
    CaseSpec spec = SampleCase(sampler, 6000000 + index);
    Random random(options.seed * 0x9e3779b97f4a7c15ull + 77 * index);
    spec.sparse = true;
    // Every other case keeps the heads that the sampler drew.
    const int32_t many = random.OneIn(2) ? random.Pick(heads) : 0;
    if (many > 0) spec.geometry.num_heads = many;
    for (RequestSpec& request : spec.requests) {
      request.lists = static_cast<ListKind>(random.Below(kListKinds));
      if (random.OneIn(2)) request.q_rows = std::min(request.q_rows, random.Pick(q_rows));
      if (many > 0) {
        request.num_heads = many;
        request.head_offset = 0;
      }
    }
    cases.push_back(spec);
  }
  return cases;
}

}  // namespace mla::conformance
