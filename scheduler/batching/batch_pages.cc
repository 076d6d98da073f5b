// Page work that fills up a batch, or is all of it.
#include <algorithm>

#include "scheduler/batching/batch.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kNanosPerMilli = 1'000'000;

}  // namespace

void BatchPolicy::TakePages(kvcache::PageWorkQueue& work, kvcache::TenantKey tenant,
                            kvcache::WorkTicket until, Batch& batch) const {
  const int64_t before = batch.pages.bytes();
  const int64_t left = limits_.launch_ms * kNanosPerMilli - cost_.Nanos(batch.key, batch.units);
  kvcache::WorkRoom room{kPageRanges - batch.pages.places(),
                         cost_.PageBytes(std::max<int64_t>(0, left)), batch.empty()};
  work.Take(tenant, until, &room, &batch.pages);
  batch.units.pages += batch.pages.bytes() - before;
}

void BatchPolicy::TakeAnyPages(kvcache::PageWorkQueue& work, Batch& batch) const {
  kvcache::WorkRoom room{kPageRanges, cost_.PageBytes(limits_.launch_ms * kNanosPerMilli)};
  work.TakeAny(&room, &batch.pages);
  batch.units.pages += batch.pages.bytes();
}

}  // namespace mla::scheduler
