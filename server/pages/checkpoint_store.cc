#include "server/pages/checkpoint_store.h"

#include <fcntl.h>
#include <openssl/sha.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "server/logging/logging.h"
#include "server/pages/page_stream.h"
#include "server/pages/page_transfer.h"

namespace mla::server {
namespace {

namespace fs = std::filesystem;
using scheduler::Engine;
using scheduler::SequenceId;

constexpr char kKeyFile[] = "key";
constexpr char kSuffix[] = ".ckpt";
constexpr char kAside[] = ".part";
constexpr size_t kFolderBytes = 16;  // part of the hash of a tenant's name
// A file has at most this number of bytes in addition to its payloads: frames, digests, the header
// without its tokens.
constexpr int64_t kSpareBytes = 64 << 10;
constexpr int64_t kGroupSpareBytes = 4096;  // the same for each page group
constexpr int64_t kTokenBytes = 8;          // one token in the header, with its part of a key
constexpr char kFilePurpose[] = "mla checkpoint files";

absl::Status SystemError(const std::string& path, const char* what, int code) {
  return MakeError(absl::StatusCode::kUnavailable,
                   absl::StrCat(path, ": ", what, ": ", std::strerror(code)),
                   {.reason = code == ENOSPC || code == EDQUOT ? "disk_full" : "disk_failed"});
}

absl::Status Unfit(const std::string& path, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat("checkpoint.path: ", path, ": ", why));
}

// False: it is there already.
absl::StatusOr<bool> MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0) {
    if (errno == EEXIST) return false;
    return SystemError(path, "mkdir", errno);
  }
  // The mode must not depend on the umask, which services may set for their sockets only.
  if (chmod(path.c_str(), 0700) != 0) return SystemError(path, "chmod", errno);
  return true;
}

v1::CheckpointHeader HeaderOf(const std::string& tenant, const scheduler::SequenceState& state,
                              const v1::PagesHeader& pages) {
  v1::CheckpointHeader header;
  header.set_tenant(tenant);
  header.set_sequence_id(state.id);
  header.set_epoch(state.epoch);
  header.set_client_id(state.client_id);
  if (state.not_finite_from != scheduler::SequenceState::kAllFinite) {
    header.set_not_finite_from(static_cast<uint64_t>(state.not_finite_from));
  }
  *header.mutable_pages() = pages;
  header.set_saved_unix_ms(static_cast<uint64_t>(UnixMillis()));
  if (state.chain == nullptr) return header;
  const kvcache::PrefixChain& chain = *state.chain;
  v1::CheckpointPrefix* const prefix = header.mutable_prefix();
  prefix->set_root(&chain.root, sizeof(chain.root));
  prefix->set_keys(chain.keys.data(), chain.keys.size() * sizeof(kvcache::PrefixKey));
  prefix->mutable_token_ids()->Add(chain.tokens.begin(), chain.tokens.end());
  prefix->set_declared(static_cast<uint64_t>(state.declared));
  prefix->set_opaque(chain.opaque);
  prefix->set_contents(state.contents);
  return header;
}

// Returns null if the header has no valid chain.
std::shared_ptr<const kvcache::PrefixChain> ChainOf(const v1::CheckpointPrefix& prefix,
                                                    int32_t page_size) {
  auto chain = std::make_shared<kvcache::PrefixChain>();
  constexpr size_t kKey = sizeof(kvcache::PrefixKey);
  chain->page_size = page_size;
  chain->opaque = prefix.opaque();
  if (prefix.root().size() != kKey || prefix.keys().size() % kKey != 0) return nullptr;
  std::memcpy(&chain->root, prefix.root().data(), kKey);
  chain->keys.resize(prefix.keys().size() / kKey);
  std::memcpy(chain->keys.data(), prefix.keys().data(), prefix.keys().size());
  chain->tokens.assign(prefix.token_ids().begin(), prefix.token_ids().end());
  const size_t whole = chain->tokens.size() / static_cast<size_t>(page_size);
  if (!chain->opaque && chain->keys.size() != whole) return nullptr;
  return prefix.declared() <= static_cast<uint64_t>(chain->rows()) ? chain : nullptr;
}

// Returns true for errors that an operator must know: faults of the disk or the file. Faults of
// callers, exceeded bounds and a draining server are not such errors.
bool IsFailure(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsInternal(status) ||
         (absl::IsUnavailable(status) && absl::StartsWith(DetailOf(status).reason, "disk_"));
}

CheckpointInfo InfoOf(const v1::CheckpointHeader& header, int64_t bytes) {
  return {header.sequence_id(),
          header.epoch(),
          static_cast<int64_t>(header.pages().rows()),
          bytes,
          header.pages().model().model_id(),
          static_cast<int64_t>(header.saved_unix_ms())};
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointStore>> CheckpointStore::Open(
    const CheckpointStoreOptions& options) {
  std::unique_ptr<CheckpointStore> store(new CheckpointStore(options));
  absl::Status status = store->Prepare();
  if (status.ok()) status = store->ReadKey();
  if (status.ok()) status = store->Scan();
  if (!status.ok()) return status;
  return store;
}

CheckpointStore::~CheckpointStore() {
  if (lock_ >= 0) close(lock_);
}

absl::Status CheckpointStore::Prepare() {
  const std::string& path = options_.path;
  MLA_RETURN_IF_ERROR(MakeFolder(path).status());
  lock_ = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0) return SystemError(path, "open", errno);
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0) return Unfit(path, "another server uses it");
  return absl::OkStatus();
}

absl::Status CheckpointStore::ReadKey() {
  const std::string path = absl::StrCat(options_.path, "/", kKeyFile);
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0 && errno == ENOENT) {
    if (!FillRandom(&key_)) return SystemError(path, "getrandom", errno);
    const std::string aside = absl::StrCat(path, kAside);
    unlink(aside.c_str());
    file = open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return SystemError(aside, "open", errno);
    const bool written =
        write(file, key_.data(), key_.size()) == static_cast<ssize_t>(key_.size()) &&
        fsync(file) == 0;
    close(file);
    if (!written || std::rename(aside.c_str(), path.c_str()) != 0 || fsync(lock_) != 0) {
      return SystemError(path, "write", errno);
    }
    return FlushOwnEntry();
  }
  if (file < 0) return SystemError(path, "open", errno);
  const absl::Cleanup closes = [file] { close(file); };
  struct stat about;
  if (fstat(file, &about) != 0) return SystemError(path, "stat", errno);
  if (!S_ISREG(about.st_mode)) return Unfit(path, "the key is not a regular file");
  if ((about.st_mode & 077) != 0) return Unfit(path, "others than its owner may read the key");
  if (about.st_size != static_cast<off_t>(key_.size()) ||
      read(file, key_.data(), key_.size()) != static_cast<ssize_t>(key_.size())) {
    return Unfit(path,
                 absl::StrCat("a key has ", key_.size(), " bytes, this file ", about.st_size));
  }
  return absl::OkStatus();
}

absl::Status CheckpointStore::FlushOwnEntry() {
  const std::string path = absl::StrCat(options_.path, "/..");
  const int parent = openat(lock_, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // If the parent folder may not be read, this process did not make an entry in it, so there is
  // nothing to flush.
  if (parent < 0) return errno == EACCES ? absl::OkStatus() : SystemError(path, "open", errno);
  const int failed = fsync(parent) == 0 || errno == EROFS || errno == EINVAL ? 0 : errno;
  close(parent);
  return failed == 0 ? absl::OkStatus() : SystemError(path, "fsync", failed);
}

absl::Status CheckpointStore::Scan() {
  const MutexLock lock(mutex_);
  int64_t latest = 0;
  std::error_code failed;
  for (fs::directory_iterator folder(options_.path, failed), end; !failed && folder != end;
       folder.increment(failed)) {
    std::error_code inner;
    if (!folder->is_directory(inner)) continue;
    for (fs::directory_iterator file(folder->path(), inner), last; !inner && file != last;
         file.increment(inner)) {
      const fs::path& path = file->path();
      if (path.extension() == kAside) {
        std::error_code ignored;
        fs::remove(path, ignored);
      } else if (path.extension() == kSuffix) {
        AddRoom(folder->path().filename(), RoomOf(path));
        struct stat about;
        if (stat(path.c_str(), &about) == 0) {
          latest = std::max<int64_t>(latest, about.st_mtim.tv_sec * 1000);
        }
      }
    }
    if (inner) return SystemError(folder->path(), "read", inner.value());
  }
  options_.counters->last_unix_ms = latest;
  return failed ? SystemError(options_.path, "read", failed.value()) : absl::OkStatus();
}

kvcache::PrefixSecret CheckpointStore::prefix_secret() const {
  const CheckpointKey derived = DeriveKey(key_, "mla prefix keys");
  kvcache::PrefixSecret secret;
  std::memcpy(secret.data(), derived.data(), secret.size());
  return secret;
}

std::string CheckpointStore::FolderOf(const std::string& tenant) const {
  unsigned char hash[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(tenant.data()), tenant.size(), hash);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(hash), kFolderBytes));
}

std::string CheckpointStore::FileOf(const std::string& tenant, SequenceId id) const {
  return absl::StrCat(options_.path, "/", FolderOf(tenant), "/", absl::StrFormat("%016x", id),
                      kSuffix);
}

CheckpointStore::Room CheckpointStore::RoomOf(const std::string& path) {
  struct stat about;
  if (lstat(path.c_str(), &about) != 0 || !S_ISREG(about.st_mode)) return {};
  return {about.st_size, 1};
}

absl::Status CheckpointStore::TakeRoom(const std::string& folder, const Room& more) {
  const MutexLock lock(mutex_);
  Room& used = used_[folder];
  const bool files = used.files + more.files > options_.tenant_files;
  const bool tenant_full = more.bytes > options_.tenant_bytes - used.bytes;
  if (!files && !tenant_full && more.bytes <= options_.bytes - used_by_all_) {
    AddRoom(folder, more);
    return absl::OkStatus();
  }
  const char* const unit = files ? " checkpoints" : " bytes of checkpoints";
  const int64_t wanted = files ? more.files : more.bytes;
  const int64_t bound = files         ? options_.tenant_files
                        : tenant_full ? options_.tenant_bytes
                                      : options_.bytes;
  const int64_t in_use = files ? used.files : tenant_full ? used.bytes : used_by_all_;
  return MakeError(absl::StatusCode::kResourceExhausted, "no room for the checkpoint",
                   {.field = "sequence_ids",
                    .got = absl::StrCat(wanted, unit),
                    .limit = absl::StrCat(bound, unit, ", ", in_use, " in use"),
                    .reason = "checkpoints_exhausted",
                    .wanted = wanted,
                    .free = std::max<int64_t>(0, bound - in_use),
                    .bound = bound,
                    .bound_of = files || tenant_full ? BoundOwner::kTenant : BoundOwner::kServer});
}

void CheckpointStore::ReturnRoom(const std::string& folder, const Room& less) {
  const MutexLock lock(mutex_);
  AddRoom(folder, {-less.bytes, -less.files});
}

void CheckpointStore::AddRoom(const std::string& folder, const Room& more) {
  Room& used = used_[folder];
  used.bytes += more.bytes;
  used.files += more.files;
  used_by_all_ += more.bytes;
  options_.counters->bytes += more.bytes;
  options_.counters->files += more.files;
}

absl::StatusOr<v1::CheckpointHeader> CheckpointStore::Write(Engine* engine,
                                                            const std::string& tenant,
                                                            const scheduler::MovingPages& pages,
                                                            CheckpointWriter* file) {
  v1::CheckpointHeader header;
  absl::Status status = SendPages(engine, tenant, pages, [&](const v1::PagesPart& part) {
    if (!part.has_header()) return file->Add(part.SerializeAsString());
    header = HeaderOf(tenant, pages.state, part.header());
    return file->Add(header.SerializeAsString());
  });
  if (status.ok()) status = file->Sync();
  if (!status.ok()) return status;
  return header;
}

absl::StatusOr<CheckpointInfo> CheckpointStore::Save(Engine* engine, const std::string& tenant,
                                                     SequenceId id, uint64_t epoch) {
  auto saved = SaveFile(engine, tenant, id, epoch);
  CheckpointCounters& counters = *options_.counters;
  if (saved.ok()) counters.last_unix_ms = saved->saved_unix_ms;
  MLA_RETURN_IF_ERROR(Ended("checkpoint_save_failed", tenant, id, saved.status(), &counters.saves,
                            &counters.save_failures));
  return saved;
}

void CheckpointStore::LogFailure(const char* event, const std::string& tenant, SequenceId id,
                                 const absl::Status& status) {
  failures_.Log(LogLevel::kError, event,
                {{"tenant", tenant}, {"sequence", id}, {"why", std::string(status.message())}});
}

absl::Status CheckpointStore::Ended(const char* event, const std::string& tenant, SequenceId id,
                                    const absl::Status& status, std::atomic<uint64_t>* done,
                                    std::atomic<uint64_t>* failed) {
  if (status.ok()) ++*done;
  if (!IsFailure(status)) return status;
  ++*failed;
  LogFailure(event, tenant, id, status);
  // The error must not tell tenants where the folder is.
  return MakeError(status.code(),
                   absl::StrReplaceAll(status.message(), {{absl::StrCat(options_.path, "/"), ""}}),
                   DetailOf(status));
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointStore::OpenFile(
    const std::string& path) const {
  return CheckpointReader::Open(
      path, DeriveKey(key_, kFilePurpose),
      {options_.sequence_rows * kTokenBytes + kSpareBytes,
       std::max(options_.chunk_bytes, kSentChunkBytes) + kGroupSpareBytes});
}

absl::StatusOr<CheckpointInfo> CheckpointStore::SaveFile(Engine* engine, const std::string& tenant,
                                                         SequenceId id, uint64_t epoch) {
  MLA_ASSIGN_OR_RETURN(const scheduler::MovingPages pages,
                       engine->BeginExport({tenant, id, epoch, 0, std::nullopt}));
  const absl::Cleanup release = [&] {
    std::vector<SequenceId> absent;
    engine->ReleaseSequences(tenant, std::vector{pages.id}, &absent);
  };
  const scheduler::PageTags& tags = pages.tags;
  if (tags.rows == 0) {
    return RefuseField("sequence_ids", "a sequence without rows", "sequences with committed rows",
                       "nothing_to_save", absl::StatusCode::kFailedPrecondition);
  }
  const std::string folder = FolderOf(tenant);
  const std::string parent = absl::StrCat(options_.path, "/", folder);
  const std::string path = FileOf(tenant, id);
  const int64_t chain = pages.state.chain == nullptr ? 0 : pages.state.chain->rows();
  Room room = {MostPayloadBytes(pages) + GroupCount(pages) * kGroupSpareBytes +
                   chain * kTokenBytes + kSpareBytes,
               RoomOf(path).files == 0 ? 1 : 0};
  MLA_RETURN_IF_ERROR(TakeRoom(folder, room));
  const absl::Cleanup give_back = [&] { ReturnRoom(folder, room); };
  MLA_ASSIGN_OR_RETURN(const bool made, MakeFolder(parent));
  if (made) fsync(lock_);
  const std::string aside = absl::StrCat(path, ".", next_aside_.fetch_add(1), kAside);
  MLA_ASSIGN_OR_RETURN(auto file,
                       CheckpointWriter::Create(path, aside, DeriveKey(key_, kFilePurpose)));
  MLA_ASSIGN_OR_RETURN(const v1::CheckpointHeader header, Write(engine, tenant, pages, file.get()));
  // Makes the entry of the tenant's folder durable, whichever call has made the folder.
  if (fsync(lock_) != 0) return SystemError(parent, "fsync", errno);
  const MutexLock lock(names_);
  const Room before = RoomOf(path);
  const absl::Status status = file->Publish();
  // The file is counted even if Publish failed, because it may have got its name.
  const Room after = RoomOf(path);
  room.bytes -= after.bytes - before.bytes;
  room.files -= after.files - before.files;
  if (!status.ok()) return status;
  return InfoOf(header, file->bytes());
}

absl::StatusOr<v1::CheckpointHeader> CheckpointStore::ReadHeader(CheckpointReader* file,
                                                                 const std::string& tenant,
                                                                 SequenceId id) const {
  std::string frame;
  MLA_ASSIGN_OR_RETURN(const bool read, file->Next(&frame));
  v1::CheckpointHeader header;
  const bool whole = read && header.ParseFromString(frame);
  if (whole && header.tenant() == tenant && header.sequence_id() == id) return header;
  return MakeError(
      absl::StatusCode::kDataLoss,
      whole ? "the checkpoint is of another sequence" : "a checkpoint without a header",
      {.reason = "checkpoint_damaged"});
}

absl::StatusOr<scheduler::SequenceInfo> CheckpointStore::Restore(Engine* engine,
                                                                 const std::string& tenant,
                                                                 SequenceId id,
                                                                 const std::string& client_id,
                                                                 int64_t lease_ms) {
  auto restored = RestoreFile(engine, tenant, id, client_id, lease_ms);
  CheckpointCounters& counters = *options_.counters;
  MLA_RETURN_IF_ERROR(Ended("checkpoint_restore_failed", tenant, id, restored.status(),
                            &counters.restores, &counters.restore_failures));
  return restored;
}

absl::StatusOr<scheduler::SequenceInfo> CheckpointStore::RestoreFile(Engine* engine,
                                                                     const std::string& tenant,
                                                                     SequenceId id,
                                                                     const std::string& client_id,
                                                                     int64_t lease_ms) {
  MLA_ASSIGN_OR_RETURN(auto file, OpenFile(FileOf(tenant, id)));
  MLA_ASSIGN_OR_RETURN(const v1::CheckpointHeader header, ReadHeader(file.get(), tenant, id));
  scheduler::ImportArgs args;
  args.tenant = tenant;
  args.model_id = header.pages().model().model_id();
  args.client_id = client_id.empty() ? header.client_id() : client_id;
  args.lease_ms = lease_ms;
  args.restored_id = id;
  MLA_RETURN_IF_ERROR(ParseHeader(header.pages(), engine->limits(), &args.tags));
  MLA_ASSIGN_OR_RETURN(const scheduler::MovingPages pages, engine->BeginImport(args));
  scheduler::SequenceState state;
  if (header.has_not_finite_from()) {
    state.not_finite_from = static_cast<int64_t>(header.not_finite_from());
  }
  state.chain = ChainOf(header.prefix(), args.tags.page_size);
  state.declared = static_cast<int32_t>(header.prefix().declared());
  state.contents = header.prefix().contents();
  std::string frame;
  v1::PagesPart part;
  const auto next = [&]() -> absl::StatusOr<v1::PagesPart*> {
    MLA_ASSIGN_OR_RETURN(const bool read, file->Next(&frame));
    if (!read && part.has_trailer()) return nullptr;
    if (read && part.ParseFromString(frame)) return &part;
    return MakeError(
        absl::StatusCode::kDataLoss,
        read ? "a checkpoint's frame is not a part" : "a checkpoint that ends without a trailer",
        {.reason = "checkpoint_damaged"});
  };
  uint64_t bytes = 0;
  const int64_t chunk = std::max(options_.chunk_bytes, kSentChunkBytes);
  return TakePages(engine, tenant, pages, chunk, next, &state, &bytes);
}

std::vector<CheckpointInfo> CheckpointStore::List(const std::string& tenant) {
  std::vector<CheckpointInfo> list;
  std::error_code failed;
  const std::string parent = absl::StrCat(options_.path, "/", FolderOf(tenant));
  for (fs::directory_iterator entry(parent, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    CheckpointInfo info;
    if (entry->path().extension() != kSuffix ||
        !absl::SimpleHexAtoi(entry->path().stem().string(), &info.id)) {
      continue;
    }
    info.bytes = RoomOf(entry->path()).bytes;
    const auto file = OpenFile(entry->path());
    const auto header = file.ok() ? ReadHeader(file->get(), tenant, info.id)
                                  : absl::StatusOr<v1::CheckpointHeader>(file.status());
    if (header.ok()) {
      info = InfoOf(*header, info.bytes);
    } else if (IsFailure(header.status())) {
      LogFailure("checkpoint_damaged", tenant, info.id, header.status());
    }
    list.push_back(std::move(info));
  }
  std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return list;
}

bool CheckpointStore::Drop(const std::string& tenant, SequenceId id) {
  const std::string path = FileOf(tenant, id);
  const MutexLock lock(names_);
  const Room room = RoomOf(path);
  if (unlink(path.c_str()) != 0) return false;
  ReturnRoom(FolderOf(tenant), room);
  return true;
}

}  // namespace mla::server
