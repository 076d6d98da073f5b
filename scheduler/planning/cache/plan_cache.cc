#include "scheduler/planning/cache/plan_cache.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::scheduler {
namespace {

constexpr int32_t kMaxLaunchSlots = 64;  // bits of Entry::pins

absl::Status Check(const PlanCacheOptions& options) {
  const auto fault = [](const char* name, int64_t got, const std::string& limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan cache.", name, ": got ", got, ", limit ", limit));
  };
  if (options.plans < 1) return fault("plans", options.plans, "at least 1");
  if (options.launch_slots < 1 || options.launch_slots > kMaxLaunchSlots) {
    return fault("launch_slots", options.launch_slots, absl::StrCat("1..", kMaxLaunchSlots));
  }
  if (options.round_plans < 0 || options.round_plans > options.plans) {
    return fault("round_plans", options.round_plans, absl::StrCat("0..", options.plans));
  }
  if (options.plan_segments < 0) return fault("plan_segments", options.plan_segments, "at least 0");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PlanCache>> PlanCache::Create(const PlanCacheOptions& options,
                                                             kernels::AttentionBackend& backend) {
  MLA_RETURN_IF_ERROR(Check(options));
  std::vector<std::unique_ptr<MetadataBuffers>> buffers;
  for (int32_t i = 0; i < options.plans; ++i) {
    MLA_ASSIGN_OR_RETURN(auto made, MetadataBuffers::Create(options.capacity, backend));
    buffers.push_back(std::move(made));
  }
  return Create(options, std::move(buffers));
}

absl::StatusOr<std::unique_ptr<PlanCache>> PlanCache::Create(
    const PlanCacheOptions& options, std::vector<std::unique_ptr<MetadataBuffers>> buffers) {
  MLA_RETURN_IF_ERROR(Check(options));
  if (buffers.size() != static_cast<size_t>(options.plans)) {
    return absl::InvalidArgumentError(absl::StrCat("plan cache.buffers: got ", buffers.size(),
                                                   ", limit exactly ", options.plans));
  }
  return std::unique_ptr<PlanCache>(new PlanCache(options, std::move(buffers)));
}

PlanCache::PlanCache(const PlanCacheOptions& options,
                     std::vector<std::unique_ptr<MetadataBuffers>> buffers)
    : options_(options), round_planner_(options.rounds), entries_(buffers.size()) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    entries_[i].buffers = std::move(buffers[i]);
    entries_[i].segments.reserve(static_cast<size_t>(options_.plan_segments));
    if (i < static_cast<size_t>(options_.round_plans)) {
      entries_[i].rounds = std::make_unique<RoundBuffers>(options_.rounds);
    }
  }
}

absl::StatusOr<const ExecutionPlan*> PlanCache::Pin(std::span<const PlanSegment> segments,
                                                    const kernels::PlanTraits& traits,
                                                    int32_t launch_slot) {
  if (launch_slot < 0 || launch_slot >= options_.launch_slots) {
    return absl::InvalidArgumentError(absl::StrCat("plan launch slot: got ", launch_slot,
                                                   ", limit 0..", options_.launch_slots - 1));
  }
  Entry* entry = Find(segments, traits);
  if (entry != nullptr) {
    ++stats_.hits;
  } else {
    if (segments.size() > static_cast<size_t>(options_.plan_segments)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("plan segments: got ", segments.size(), ", limit ", options_.plan_segments));
    }
    const bool with_rounds = traits.rounds.workspace_bytes > 0;
    entry = OldestUnpinned(with_rounds);
    if (entry == nullptr) {
      const int32_t limit =
          with_rounds ? options_.round_plans : options_.plans - options_.round_plans;
      return absl::ResourceExhaustedError(
          absl::StrCat("plans: all ", limit, " are pinned by running launches"));
    }
    const MonotonicNanos begin = Now();
    MLA_RETURN_IF_ERROR(Build(segments, traits, entry));
    stats_.build_ns += Now() - begin;
    ++stats_.misses;
  }
  entry->pins |= uint64_t{1} << launch_slot;
  entry->last_used = ++uses_;
  return &*entry->plan;
}

void PlanCache::Unpin(int32_t launch_slot) {
  if (launch_slot < 0 || launch_slot >= options_.launch_slots) return;
  for (Entry& entry : entries_) entry.pins &= ~(uint64_t{1} << launch_slot);
}

PlanCache::Entry* PlanCache::Find(std::span<const PlanSegment> segments,
                                  const kernels::PlanTraits& traits) {
  const auto same = [&](const Entry& entry) {
    return entry.plan.has_value() && entry.traits == traits &&
           std::equal(segments.begin(), segments.end(), entry.segments.begin(),
                      entry.segments.end());
  };
  const auto found = std::find_if(entries_.begin(), entries_.end(), same);
  return found == entries_.end() ? nullptr : &*found;
}

absl::Status PlanCache::Build(std::span<const PlanSegment> segments,
                              const kernels::PlanTraits& traits, Entry* entry) {
  entry->plan.reset();  // absent until it is complete
  MLA_ASSIGN_OR_RETURN(kernels::PlanView view, planner_.Build(segments, traits, *entry->buffers));
  if (traits.rounds.workspace_bytes > 0) {
    MLA_ASSIGN_OR_RETURN(kernels::RoundView rounds,
                         round_planner_.Build(view, segments, traits, *entry->rounds));
    entry->round_view = rounds;
    view.rounds = &entry->round_view;
  }
  entry->segments.assign(segments.begin(), segments.end());
  entry->traits = traits;
  entry->plan = ExecutionPlan(view, entry->segments, planner_.last_imbalance());
  return absl::OkStatus();
}

// An entry without a plan counts as older than all others.
PlanCache::Entry* PlanCache::OldestUnpinned(bool with_rounds) {
  Entry* oldest = nullptr;
  for (Entry& entry : entries_) {
    if (entry.pins != 0 || (entry.rounds != nullptr) != with_rounds) continue;
    if (!entry.plan.has_value()) return &entry;
    if (oldest == nullptr || entry.last_used < oldest->last_used) oldest = &entry;
  }
  return oldest;
}

}  // namespace mla::scheduler
