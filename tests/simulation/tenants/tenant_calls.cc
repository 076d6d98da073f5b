#include "tests/simulation/tenants/tenant_calls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::simulation {
namespace {

using scheduler::Resource;

constexpr int kGuests = 8;
constexpr size_t kMostHeld = 24;
constexpr int64_t kBytes = 512;  // for one of a resource that is counted in bytes

int64_t Amount(int resource, int64_t count) {
  return TenantBooks::InBytes(resource) ? count * kBytes : count;
}

TenantBooks::Each<int64_t> DrawBounds(const TenantCalls::Pick& pick, uint64_t low, uint64_t high) {
  TenantBooks::Each<int64_t> bounds;
  for (int i = 0; i < TenantBooks::kResources; ++i) {
    bounds[i] = Amount(i, static_cast<int64_t>(low + pick(high - low + 1)));
  }
  return bounds;
}

}  // namespace

TenantCalls::TenantCalls(size_t most_tenants, Pick pick)
    : pick_(std::move(pick)),
      server_(DrawBounds(pick_, 3, 9)),
      defaults_(DrawBounds(pick_, 1, 6)),
      configured_(DrawQuota()),
      books_(most_tenants, server_, defaults_) {
  books_.Configure("guest-0", configured_);
}

Resource TenantCalls::ResourceOf(int resource) {
  constexpr Resource kOf[] = {Resource::kStagedBytes, Resource::kStreams,
                              Resource::kUploads,     Resource::kRegions,
                              Resource::kRegionBytes, Resource::kControlCalls};
  static_assert(std::size(kOf) == TenantBooks::kResources);
  return kOf[resource];
}

TenantBooks::Quota TenantCalls::DrawQuota() {
  TenantBooks::Quota quota;
  for (int i = 0; i < TenantBooks::kResources; ++i) {
    if (Chance(40)) quota.bounds[i] = Amount(i, static_cast<int64_t>(pick_(6)));
  }
  if (Chance(30)) quota.weight = 1 + static_cast<int>(pick_(5));
  return quota;
}

scheduler::TenantQuota TenantCalls::QuotaOf(const TenantBooks::Quota& quota) {
  scheduler::TenantQuota bounds;
  for (int i = 0; i < TenantBooks::kResources; ++i) bounds.bounds[ResourceOf(i)] = quota.bounds[i];
  bounds.weight = quota.weight;
  return bounds;
}

void TenantCalls::AddTo(scheduler::TenantTableOptions* options) const {
  for (int i = 0; i < TenantBooks::kResources; ++i) {
    options->default_bounds[ResourceOf(i)] = defaults_[i];
  }
  options->quotas["guest-0"] = QuotaOf(configured_);
}

void TenantCalls::Start(scheduler::TenantTable* table) {
  table_ = table;
  for (int i = 0; i < TenantBooks::kResources; ++i) {
    table->SetServerBound(ResourceOf(i), server_[i]);
  }
}

void TenantCalls::Keep(const std::string& name, scheduler::TenantRef row, std::string* violation) {
  Fail(books_.Entered(name, row->key()));
  ++books_.Find(name)->references;
  guests_.push_back({name, std::move(row), true});
  *violation = violation_;
}

bool TenantCalls::Do(std::string* violation) {
  bool done = true;
  switch (pick_(10)) {
    case 0:
    case 1:
      Enter();
      break;
    case 2:
      done = Leave();
      break;
    case 3:
      SetQuota();
      break;
    case 4:
    case 5:
    case 6:
      done = Return();
      break;
    default:
      done = Take();
      break;
  }
  if (!guests_.empty()) Check(guests_[pick_(guests_.size())].name);
  *violation = violation_;
  return done;
}

void TenantCalls::Enter() {
  const std::string name = absl::StrCat("guest-", pick_(kGuests));
  const bool room = books_.MakeRoomFor(name);
  auto row = table_->Enter(name);
  if (row.ok() != room || (!room && DetailOf(row.status()).reason != "tenants_exhausted")) {
    Fail(absl::StrCat("Enter: foretold ", room ? "granted" : "tenants_exhausted", ", got ",
                      row.status().ToString()));
  }
  if (!row.ok()) ++refusals_;
  if (!row.ok() || !violation_.empty()) return;
  Fail(books_.Entered(name, (*row)->key()));
  // A call that holds nothing is over at once, and its row may go.
  if (guests_.size() > kGuests || Chance(30)) return;
  ++books_.Find(name)->references;
  guests_.push_back({name, *std::move(row)});
}

// A tenant gives up its row; resources that it holds keep the row.
bool TenantCalls::Leave() {
  if (guests_.empty()) return false;
  const size_t index = pick_(guests_.size());
  if (guests_[index].kept) return false;
  --books_.Find(guests_[index].name)->references;
  guests_.erase(guests_.begin() + static_cast<int64_t>(index));
  return true;
}

bool TenantCalls::Take() {
  if (guests_.empty() || holdings_.size() >= kMostHeld) return false;
  const Guest& guest = guests_[pick_(guests_.size())];
  Holding wanted{guest.name, guest.row.get(), static_cast<int>(pick_(TenantBooks::kResources))};
  wanted.amount = TenantBooks::InBytes(wanted.resource)
                      ? 1 + static_cast<int64_t>(pick_(3 * static_cast<uint64_t>(kBytes)))
                      : 1;
  const int64_t reserve =
      Chance(20) ? Amount(wanted.resource, 1 + static_cast<int64_t>(pick_(2))) : 0;
  const bool granted = books_.MayTake(guest.name, wanted.resource, wanted.amount, reserve);
  absl::Status status;
  const Resource resource = ResourceOf(wanted.resource);
  if (Chance(50)) {
    status = table_->Take(*guest.row, resource, wanted.amount, "field", reserve);
  } else if (!table_->TryTake(*guest.row, resource, wanted.amount, reserve)) {
    status = table_->Refusal(*guest.row, resource, wanted.amount, "field");
  }
  if (status.ok() != granted) {
    Fail(absl::StrCat("Take ", wanted.amount, " ", TenantBooks::Name(wanted.resource), " of ",
                      guest.name, ", reserve ", reserve, ": foretold ",
                      granted ? "granted" : "refused", ", got ", status.ToString()));
    return true;
  }
  TenantBooks::Row& row = *books_.Find(guest.name);
  if (!granted) {
    ++refusals_;
    ++row.refused[wanted.resource];
    if (reserve == 0) CheckRefusal(wanted, status);
    return true;
  }
  row.used[wanted.resource] += wanted.amount;
  holdings_.push_back(wanted);
  return true;
}

void TenantCalls::CheckRefusal(const Holding& wanted, const absl::Status& status) {
  const ErrorDetail detail = DetailOf(status);
  const bool own = detail.bound_of == BoundOwner::kTenant;
  const int64_t bound =
      own ? books_.Bound(wanted.name, wanted.resource) : books_.ServerBound(wanted.resource);
  const int64_t used =
      own ? books_.Find(wanted.name)->used[wanted.resource] : books_.ServerUsed(wanted.resource);
  if (detail.resource == TenantBooks::Name(wanted.resource) && detail.wanted == wanted.amount &&
      detail.bound == bound && detail.free == std::max<int64_t>(0, bound - used) &&
      detail.free < wanted.amount && absl::IsResourceExhausted(status)) {
    return;
  }
  Fail(absl::StrCat("a refusal names ", detail.resource, ", wanted ", detail.wanted, ", ",
                    detail.free, " free of ", detail.bound, "; foretold ",
                    TenantBooks::Name(wanted.resource), ", ", wanted.amount, ", ",
                    std::max<int64_t>(0, bound - used), " of ", bound));
}

bool TenantCalls::Return() {
  if (holdings_.empty()) return false;
  const size_t index = pick_(holdings_.size());
  const int64_t all = holdings_[index].amount;
  // Staged bytes of a reply are returned piece by piece.
  ReturnPart(index, Chance(70) ? all : 1 + static_cast<int64_t>(pick_(static_cast<uint64_t>(all))));
  return true;
}

void TenantCalls::ReturnPart(size_t index, int64_t amount) {
  Holding& held = holdings_[index];
  table_->Return(*held.tenant, ResourceOf(held.resource), amount);
  books_.Find(held.name)->used[held.resource] -= amount;
  held.amount -= amount;
  if (held.amount > 0) return;
  std::swap(held, holdings_.back());
  holdings_.pop_back();
}

void TenantCalls::SetQuota() {
  // Also for a name that has no row.
  std::string name = absl::StrCat("guest-", pick_(kGuests));
  bool reset = Chance(50);
  if (!guests_.empty() && Chance(70)) {
    const Guest& guest = guests_[pick_(guests_.size())];
    name = guest.name;
    reset = reset && !guest.kept;  // it also has bounds of the engine's resources
  }
  const TenantBooks::Quota quota = Chance(40) ? TenantBooks::Quota() : DrawQuota();
  const bool room = books_.MaySetQuota(name);
  const absl::Status status = table_->SetQuota(name, QuotaOf(quota), reset);
  if (status.ok() != room || (!room && DetailOf(status).reason != "tenants_exhausted")) {
    Fail(absl::StrCat("SetQuota: foretold ", room ? "granted" : "tenants_exhausted", ", got ",
                      status.ToString()));
  }
  if (room) books_.SetQuota(name, quota, reset);
  refusals_ += !room;
  Check(name);
}

bool TenantCalls::SetOtherQuota(const std::string& name) {
  if (!books_.MaySetQuota(name)) return false;
  TenantBooks::Quota quota;
  quota.others = true;
  books_.SetQuota(name, quota, /*reset=*/true);
  return true;
}

void TenantCalls::Check(const std::string& name) {
  const TenantBooks::Row* row = books_.Find(name);
  const scheduler::TenantUsage usage = table_->Usage(name);
  if (static_cast<size_t>(table_->size()) != books_.rows()) {
    Fail(absl::StrCat("the table has ", table_->size(), " rows, foretold ", books_.rows()));
  }
  if (usage.key != (row == nullptr ? 0 : row->key) || usage.weight != books_.Weight(name) ||
      (row != nullptr && table_->weight(row->key) != usage.weight)) {
    Fail(absl::StrCat(name, ": key ", usage.key, ", weight ", usage.weight));
  }
  for (int i = 0; i < TenantBooks::kResources; ++i) {
    const Resource resource = ResourceOf(i);
    const int64_t used = row == nullptr ? 0 : row->used[i];
    const uint64_t refused = row == nullptr ? 0 : row->refused[i];
    if (usage.used[resource] == used && usage.refused[resource] == refused &&
        usage.bound[resource] == books_.Bound(name, i) &&
        table_->server_used(resource) == books_.ServerUsed(i)) {
      continue;
    }
    Fail(absl::StrCat(name, " ", TenantBooks::Name(i), ": ", usage.used[resource], " used of ",
                      usage.bound[resource], ", ", usage.refused[resource], " refused, in all ",
                      table_->server_used(resource), "; foretold ", used, " of ",
                      books_.Bound(name, i), ", ", refused, ", in all ", books_.ServerUsed(i)));
  }
}

void TenantCalls::Finish(std::string* violation) {
  while (!holdings_.empty()) ReturnPart(0, holdings_[0].amount);
  for (const Guest& guest : guests_) Check(guest.name);
  for (const Guest& guest : guests_) --books_.Find(guest.name)->references;
  guests_.clear();
  for (int i = 0; i < TenantBooks::kResources; ++i) {
    if (table_->server_used(ResourceOf(i)) != 0) Fail("something is in use at the end");
  }
  *violation = violation_;
}

}  // namespace mla::simulation
