#include "scheduler/kvcache/tiers/tier_store.h"

#include <optional>
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

// One key for all tenants: a room is written completely before it is read.
constexpr TenantKey kAnyTenant = 1;

absl::Status Damaged() {
  return MakeError(absl::StatusCode::kDataLoss, "a page group is not what was put into its tier",
                   {.reason = "tier_damaged"});
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
    : memory_(FromBlock(options.memory)), host_(options.host_bytes) {
  Require(static_cast<int64_t>(memory_.size()) >= options.host_bytes,
          "the host tier's memory is too small");
}

absl::StatusOr<std::unique_ptr<TierStore>> TierStore::Open(const TierStoreOptions& options) {
  std::unique_ptr<TierStore> store(new TierStore(options));
  if (!options.file_path.empty()) {
    MLA_ASSIGN_OR_RETURN(store->file_, TierFile::Open(options.file_path, options.file_bytes));
    MLA_RETURN_IF_ERROR(store->file_->SelfTest());
    store->file_rooms_ = std::make_unique<TierRooms>(options.file_bytes);
  }
  if (store->file_ != nullptr && options.threads > 0) {
    store->disk_ = std::make_unique<DiskQueue>(store->file_.get(), options.threads);
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

bool TierStore::Prepare(TierJob* job) {
  const std::span<const std::byte> bytes = job->host.first(job->bytes);
  job->status = absl::OkStatus();
  if (job->kind == TierJob::Kind::kRead) {
    if (!job->was_read) return true;
    if (!mac_.Holds(job->seal, bytes)) job->status = Damaged();
    return false;
  }
  if (const std::optional<GroupSeal> seal = mac_.SealIf(job->digest, bytes)) {
    job->seal = *seal;
  } else {
    job->status = Damaged();
  }
  return job->status.ok();
}

void TierStore::Run(TierJob* job) {
  if (!Prepare(job)) return End(job);
  DiskMove& move = job->disk;
  move.write = job->kind == TierJob::Kind::kWrite;
  move.bytes = job->host;
  move.at = job->at;
  move.done = [this, job] { OnDisk(job); };
  if (disk_ != nullptr) return disk_->Start(&move);
  move.status = move.write ? file_->Write(move.at, move.bytes) : file_->Read(move.at, move.bytes);
  move.done();
}

void TierStore::OnDisk(TierJob* job) {
  job->status = job->disk.status;
  if (job->kind == TierJob::Kind::kWrite || !job->status.ok()) return End(job);
  job->was_read = true;
  Queue(job);
}

void TierStore::End(TierJob* job) {
  {
    const MutexLock lock(mutex_);
    ended_.push_back(job);
    has_ended_ = true;
  }
  if (!threads_.empty() && wake_) wake_();
}

void TierStore::Start(TierJob* job) {
  job->was_read = false;
  Queue(job);
}

void TierStore::Queue(TierJob* job) {
  if (threads_.empty()) return Run(job);
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
  }
}

std::vector<TierJob*> TierStore::Collect() {
  if (!has_ended()) return {};
  const MutexLock lock(mutex_);
  has_ended_ = false;
  return std::exchange(ended_, {});
}

}  // namespace mla::kvcache
