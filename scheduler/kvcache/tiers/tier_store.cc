#include "scheduler/kvcache/tiers/tier_store.h"

#include <chrono>
#include <utility>

#include "base/error.h"
#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

constexpr TenantKey kAnyTenant = 1;  // rooms are written whole before they are read

// The beginning of the memory that is a multiple of kTierBlock.
std::span<std::byte> Aligned(std::span<std::byte> memory) {
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  const auto block = static_cast<uintptr_t>(kTierBlock);
  return memory.subspan((block - at % block) % block);
}

int64_t Now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

uint32_t TierRooms::Take(int64_t group_bytes) {
  const int64_t bytes = Rounded(group_bytes);
  const auto [size, added] = sizes_.try_emplace(bytes);
  if (added) {
    const auto layout =
        pool_.AddLayout(MakeLayout({.row_bytes = bytes, .page_size = 1, .layers = 1}));
    if (!layout.ok()) {
      sizes_.erase(size);
      return kNone;
    }
    size->second.layout = *layout;
  }
  const uint32_t room = pool_.Take(size->second.layout, kAnyTenant).entry;
  size->second.groups += room != kNone;
  if (size->second.groups == 0) {
    pool_.RemoveLayout(size->second.layout);
    sizes_.erase(size);
  }
  return room;
}

void TierRooms::Free(uint32_t room, int64_t group_bytes) {
  const auto size = sizes_.find(Rounded(group_bytes));
  Require(size != sizes_.end(), "a room of another size is freed");
  pool_.Drop(room);
  if (--size->second.groups > 0) return;
  pool_.RemoveLayout(size->second.layout);
  sizes_.erase(size);
}

TierStore::TierStore(const TierStoreOptions& options)
    : memory_(Aligned(options.memory)), host_(options.host_bytes) {
  Require(static_cast<int64_t>(memory_.size()) >= options.host_bytes,
          "the host tier's memory is too small");
}

absl::StatusOr<std::unique_ptr<TierStore>> TierStore::Open(const TierStoreOptions& options) {
  std::unique_ptr<TierStore> store(new TierStore(options));
  if (!options.file_path.empty()) {
    auto file = TierFile::Open(options.file_path, options.file_bytes);
    if (!file.ok()) return file.status();
    store->file_ = *std::move(file);
    if (absl::Status tested = store->file_->SelfTest(); !tested.ok()) return tested;
    store->file_rooms_ = std::make_unique<TierRooms>(options.file_bytes);
  }
  for (int32_t i = 0; i < options.threads; ++i) {
    store->threads_.emplace_back([raw = store.get()] { raw->Work(); });
  }
  return store;
}

TierStore::~TierStore() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status TierStore::Check(const TierJob& job) const {
  if (mac_.Holds(job.seal, job.host.first(job.bytes))) return absl::OkStatus();
  return MakeError(absl::StatusCode::kDataLoss, "a page group is not what was put into its tier",
                   {.reason = "tier_damaged"});
}

void TierStore::Run(TierJob* job) {
  const int64_t begin = Now();
  job->status = absl::OkStatus();
  switch (job->kind) {
    case TierJob::Kind::kSeal:
      job->seal = mac_.Seal(job->host.first(job->bytes));
      break;
    case TierJob::Kind::kCheck:
      job->status = Check(*job);
      break;
    case TierJob::Kind::kWrite:
      job->status = Check(*job);
      if (job->status.ok()) job->status = file_->Write(job->at, job->host);
      break;
    case TierJob::Kind::kRead:
      job->status = file_->Read(job->at, job->host);
      if (job->status.ok()) job->status = Check(*job);
      break;
  }
  job->ran_ns = Now() - begin;
}

void TierStore::Start(TierJob* job) {
  if (threads_.empty()) {
    Run(job);
    const MutexLock lock(mutex_);
    ended_.push_back(job);
    has_ended_ = true;
    return;
  }
  {
    const MutexLock lock(mutex_);
    waiting_.push_back(job);
  }
  changed_.NotifyOne();
}

void TierStore::Work() {
  MutexLock lock(mutex_);
  while (true) {
    changed_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stopping_ || !waiting_.empty();
    });
    if (stopping_) return;
    TierJob* const job = waiting_.front();
    waiting_.pop_front();
    lock.Unlock();
    Run(job);
    lock.Lock();
    ended_.push_back(job);
    has_ended_ = true;
    lock.Unlock();
    if (wake_) wake_();
    lock.Lock();
  }
}

std::vector<TierJob*> TierStore::Collect() {
  if (!has_ended()) return {};
  const MutexLock lock(mutex_);
  has_ended_ = false;
  return std::exchange(ended_, {});
}

}  // namespace mla::kvcache
