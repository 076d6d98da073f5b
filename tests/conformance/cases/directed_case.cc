#include "tests/conformance/cases/directed_case.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace mla::conformance {
namespace {

constexpr int32_t kMostRows = 1 << 20;

absl::Status Wrong(absl::string_view text, absl::string_view part, absl::string_view got,
                   absl::string_view want) {
  return absl::InvalidArgumentError(
      absl::StrCat("shape ", text, ": ", part, ": got '", got, "', must be ", want));
}

absl::StatusOr<int32_t> Number(absl::string_view text, absl::string_view part,
                               absl::string_view got, int32_t least, int32_t most) {
  int32_t value = 0;
  if (!absl::SimpleAtoi(got, &value) || value < least || value > most) {
    return Wrong(text, part, got, absl::StrCat(least, " to ", most));
  }
  return value;
}

absl::StatusOr<RequestSpec> ParseRequest(absl::string_view text, absl::string_view request,
                                         int32_t heads) {
  const std::vector<absl::string_view> fields = absl::StrSplit(request, ',');
  if (fields.size() < 3 || fields.size() > 4 || (fields.size() == 4 && fields[3] != "full")) {
    return Wrong(text, "request", request, "Q,CACHED,PAGE[,full]");
  }
  const auto q = Number(text, "query rows", fields[0], 0, kMostRows);
  if (!q.ok()) return q.status();
  const auto cached = Number(text, "cached rows", fields[1], 0, kMostRows);
  if (!cached.ok()) return cached.status();
  const auto page = Number(text, "rows a page", fields[2], 1, kMostRows);
  if (!page.ok()) return page.status();
  RequestSpec r;
  r.q_rows = *q;
  r.cached_rows = *cached;
  r.page_size = *page;
  r.num_heads = heads;
  r.causal = fields.size() == 3;
  return r;
}

}  // namespace

absl::StatusOr<CaseSpec> ParseCase(const SamplerOptions& options, uint64_t index,
                                   absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  if (parts.size() < 3 || parts.size() > 4) {
    return Wrong(text, "shape", text, "ROUTE:HEADS:REQUEST[/REQUEST...][:UNITS]");
  }
  CaseSpec spec = SampleCase(options, index);
  if (parts[0] == "absorbed") {
    spec.route = Route::kAbsorbed;
  } else if (parts[0] == "expanded") {
    spec.route = Route::kExpanded;
  } else if (parts[0] == "project") {
    spec.route = Route::kAbsorbProject;
  } else if (parts[0] == "v32") {
    spec.route = Route::kAbsorbed;
    spec.sparse = true;
  } else {
    return Wrong(text, "route", parts[0], "absorbed, expanded, project or v32");
  }
  const auto heads = Number(text, "heads", parts[1], 1, 1024);
  if (!heads.ok()) return heads.status();
  const auto units = parts.size() == 4 ? Number(text, "units", parts[3], 1, 4096) : 4;
  if (!units.ok()) return units.status();
  spec.geometry = options.full;
  spec.geometry.num_heads = *heads;
  spec.units = *units;
  spec.q_dtype = spec.latent_q_dtype = kernels::DType::kBf16;
  spec.softmax_scale = 0.135234f;
  spec.requests.clear();
  for (const absl::string_view request : absl::StrSplit(parts[2], '/')) {
    auto parsed = ParseRequest(text, request, *heads);
    if (!parsed.ok()) return parsed.status();
    parsed->lists = static_cast<ListKind>((index + spec.requests.size()) % kListKinds);
    spec.requests.push_back(*parsed);
  }
  return spec;
}

CaseSpec ParseOrEnd(const SamplerOptions& options, uint64_t index, absl::string_view text) {
  auto spec = ParseCase(options, index, text);
  if (spec.ok()) return *std::move(spec);
  std::fprintf(stderr, "%s\n", spec.status().ToString().c_str());
  std::exit(2);
}

}  // namespace mla::conformance
