// Launches of attention to a window and to entries (kernels/types/window.h), and their expected
// results, by an oracle of its own in fp64.
//
// Rows and entries that a query row does not attend to are NaN, and page tables are invalid for
// pages that the window has passed.
#ifndef MLA_TESTS_CONFORMANCE_SPARSE_WINDOW_WORKLOAD_H_
#define MLA_TESTS_CONFORMANCE_SPARSE_WINDOW_WORKLOAD_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/launch_layout.h"
#include "tests/conformance/suite/plan_builder.h"

namespace mla::conformance {

// kTwice: each entry stands at two places, and counts twice.
enum class WindowLists { kNone, kSome, kHoles, kEmpty, kTwice };
enum class WindowSinks { kNone, kAny, kInfinite, kMinusInfinite };

struct WindowRequest {
  int32_t window = 8, ratio = 4, page = 4, entry_page = 2, cached = 40, q_rows = 1;
  WindowLists lists = WindowLists::kNone;
  WindowSinks sinks = WindowSinks::kAny;
  bool nan = false;  // a row within the attention holds NaN
};

struct WindowCase {
  uint64_t seed = 0;
  int32_t heads = 8, latent = 32, rope = 16;
  kernels::KvFormat rows = kernels::KvFormat::kBf16, entries = kernels::KvFormat::kBf16;
  kernels::DType q = kernels::DType::kBf16, o = kernels::DType::kF32;
  int32_t units = 1;
  std::vector<WindowRequest> requests;
};

std::string ToString(const WindowCase& c);
// Cases of arbitrary shapes.
std::vector<WindowCase> WindowCases();
// Cases with rows of DeepSeek V4's shape, in formats that GPUs take: bf16 queries, and the same
// format for rows and entries. Equal seeds make equal cases.
std::vector<WindowCase> WideWindowCases(int32_t count, uint64_t seed = 12);
// Cases of such rows in both formats, around the borders of tiles and pages: windows as long as the
// context, one row longer and one shorter; as many places as fill tiles; pages of rows, of entries
// or of both that hold no power of two; entries that stand twice.
std::vector<WindowCase> DirectedWindowCases();
// Limits of a backend that runs such cases.
kernels::BackendLimits WindowLimits();

// One thread.
class WindowWorkload {
 public:
  // A request's tensors, and where they lie.
  struct Tensors {
    std::vector<float> rows, entries, q, sinks;  // as sent; NaN where nothing may be read
    std::vector<float> stored_rows, stored_entries;
    std::vector<int32_t> list, begin;            // as in SegmentRecord
    std::vector<std::multiset<int32_t>> chosen;  // entries that a query row attends to
    int64_t row_table = 0, entry_table = 0, row_stride = 0, entry_stride = 0;
    int32_t longest = 0;  // places
    std::vector<std::byte> narrow_q, narrow_o;
    std::vector<float> o, lse;
  };

  explicit WindowWorkload(const WindowCase& c);

  const Tensors& first() const { return tensors_[0]; }
  // Runs all requests in one launch, or one of them alone. Also returns an error if the backend
  // does not support such cases.
  absl::Status Run(kernels::AttentionBackend& backend, const PlanBuilder& plan, int32_t units,
                   int64_t only = -1);
  // Checks the results of the last Run.
  absl::Status Check() const;

 private:
  static constexpr int64_t kRowOffset = 64, kEntryOffset = 128;

  // Addresses of a request's tensors in the launch.
  struct Places {
    const void *rows, *entries, *q, *sinks, *list, *begin;
    void *o, *lse;
  };

  int32_t dim() const { return c_.latent + c_.rope; }
  float Normal() { return normal_(random_); }
  int32_t Whole(const WindowRequest& r, int32_t row) const {
    return r.ratio == 0 ? 0 : (r.cached + row + 1) / r.ratio;
  }
  kernels::KvRowLayout Layout(kernels::KvFormat format) const {
    return kernels::MakeKvRowLayout(format, c_.latent, c_.rope);
  }
  kernels::AttentionDesc Desc() const;
  void Make(const WindowRequest& r);
  void MakeLists(const WindowRequest& r, Tensors* t);
  void Fill(std::vector<float>* values, int32_t row);
  std::vector<float> Stored(const std::vector<float>& sent, kernels::KvFormat format) const;
  int64_t Table(int32_t pages, int32_t gone);
  std::vector<std::byte> Narrowed(const std::vector<float>& values, kernels::DType dtype) const;
  absl::Status Place(kernels::LaunchLayout* layout, Tensors* t, Places* at) const;
  void AddAppends(const WindowRequest& r, const Tensors& t, const Places& at,
                  std::vector<kernels::AppendRecord>* to) const;
  kernels::SegmentRecord Segment(const WindowRequest& r, const Tensors& t, const Places& at) const;
  absl::Status CheckRow(size_t index, int32_t row, int32_t head) const;

  const WindowCase c_;
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  int64_t group_bytes_ = 0;
  std::vector<uint32_t> table_;
  std::vector<Tensors> tensors_;
};

// Runs the cases with each plan and returns their failures. `backend` has WindowLimits. If
// `progress`, each case is printed before it runs, because a launch may hang, and after it the time
// of each of its parts.
std::vector<std::string> RunWindows(kernels::AttentionBackend& backend,
                                    std::span<const PlanBuilder> plans,
                                    std::span<const WindowCase> cases, bool progress);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SPARSE_WINDOW_WORKLOAD_H_
