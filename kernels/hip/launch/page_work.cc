#include "kernels/hip/launch/page_work.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

// More blocks than any device runs at a time; in longer lists each block takes several chunks.
constexpr int64_t kMaxMoveBlocks = 1 << 16;

}  // namespace

PageWork::PageWork(const DeviceState& device, const BackendLimits& limits)
    : device_(device), limits_(limits) {
  const auto pages = static_cast<size_t>(limits.page_ranges);
  const auto tables = static_cast<size_t>(limits.table_ranges);
  moves_.reserve(std::max(pages, tables));
  run_ends_.reserve(pages);
  digest_ranges_.reserve(pages);
  first_parts_.reserve(pages + 1);
  page_runs_.Reserve(pages);
  table_ranges_.reserve(tables);
}

int64_t PageWork::MetadataBytes(const BackendLimits& l) {
  constexpr int64_t kAppends = 2;  // appends of a request: rows, and index keys or entries
  const int64_t appends = int64_t{l.launch_requests} * kAppends *
                          static_cast<int64_t>(sizeof(AppendRecord) + sizeof(int32_t));
  const int64_t tables = l.page_table_entries * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t moves = (int64_t{l.page_ranges} + l.table_ranges) *
                        static_cast<int64_t>(sizeof(MoveRange) + 2 * sizeof(int32_t));
  constexpr int64_t kLists = 2;  // page writes and page reads
  const int64_t digests =
      kLists * (l.page_ranges * static_cast<int64_t>(sizeof(DigestRange)) +
                (int64_t{l.page_ranges} + 1) * static_cast<int64_t>(sizeof(int32_t)));
  return appends + tables + moves + digests;
}

absl::Status PageWork::AddMoves(LaunchRecording& recording, std::span<const size_t> ends) {
  StagedRegion& metadata = recording.metadata();
  MLA_ASSIGN_OR_RETURN(auto ranges, metadata.Put(std::span<const MoveRange>(moves_)));
  const size_t counts = moves_.size() + ends.size();
  MLA_ASSIGN_OR_RETURN(int64_t at, metadata.Take(static_cast<int64_t>(counts * sizeof(int32_t))));
  const auto* on_device = reinterpret_cast<const int32_t*>(metadata.device(at));
  int64_t offset = at;
  const auto put = [&metadata, &offset](int64_t first_chunk) {
    const auto value = static_cast<int32_t>(first_chunk);
    metadata.Write(offset, &value, sizeof(value));
    offset += static_cast<int64_t>(sizeof(value));
  };
  size_t begin = 0;
  for (const size_t end : ends) {
    int64_t chunks = 0;
    for (size_t i = begin; i < end; ++i) {
      put(chunks);
      chunks += (moves_[i].bytes + kMoveChunkBytes - 1) / kMoveChunkBytes;
      if (chunks > std::numeric_limits<int32_t>::max()) {
        return absl::ResourceExhaustedError(absl::StrCat("page ranges: more than ",
                                                         std::numeric_limits<int32_t>::max(),
                                                         " pieces of ", kMoveChunkBytes, " bytes"));
      }
    }
    put(chunks);
    MoveArgs args = {};
    args.ranges = ranges + begin;
    args.first_chunk = on_device;
    args.count = static_cast<int32_t>(end - begin);
    args.blocks = static_cast<int32_t>(std::min(chunks, kMaxMoveBlocks));
    on_device += args.count + 1;
    begin = end;
    if (chunks == 0) continue;
    const LaunchShape shape{.grid_x = static_cast<uint32_t>(args.blocks), .threads = kBlockThreads};
    MLA_RETURN_IF_ERROR(recording.AddKernel(device_.kernels.move, shape, args));
  }
  return absl::OkStatus();
}

absl::Status PageWork::AddPages(LaunchRecording& recording, std::span<const PageRange> ranges) {
  MLA_RETURN_IF_ERROR(CheckPageRanges(ranges, limits_));
  if (ranges.empty()) return absl::OkStatus();
  moves_.clear();
  run_ends_.clear();
  auto* const pool = device_.pool.As<uint8_t>();
  for (size_t done = 0; done < ranges.size();) {
    const size_t run = page_runs_.Next(ranges.subspan(done));
    for (const PageRange& r : ranges.subspan(done, run)) {
      for (int32_t i = 0; i < r.count; ++i) {
        const PageRange at = r.place(i);
        moves_.push_back(
            {pool + at.target_offset, at.zeroes() ? nullptr : pool + at.source_offset, at.bytes});
      }
    }
    done += run;
    run_ends_.push_back(moves_.size());
  }
  return AddMoves(recording, run_ends_);
}

absl::StatusOr<LaunchRecording::Digests> PageWork::DigestsOf(
    LaunchRecording& recording, std::span<const PageTransfer> transfers) {
  digest_ranges_.clear();
  first_parts_.assign(1, 0);
  for (const PageTransfer& t : transfers) {
    if (t.digests == nullptr || t.bytes == 0) continue;
    digest_ranges_.push_back({device_.pool.As<uint8_t>() + t.pool_offset, t.bytes});
    first_parts_.push_back(first_parts_.back() + static_cast<int32_t>(DigestParts(t.bytes)));
  }
  LaunchRecording::Digests digests;
  if (digest_ranges_.empty()) return digests;
  StagedRegion& metadata = recording.metadata();
  auto ranges = metadata.Put(std::span<const DigestRange>(digest_ranges_));
  auto first_parts = metadata.Put(std::span<const int32_t>(first_parts_));
  if (!ranges.ok() || !first_parts.ok()) {
    return ranges.ok() ? first_parts.status() : ranges.status();
  }
  digests.transfers = transfers;
  digests.first = recording.digests_taken();
  digests.parts = first_parts_.back();
  DigestArgs args = {};
  args.ranges = *ranges;
  args.first_part = *first_parts;
  args.digests = recording.digests() + 2 * digests.first;
  args.count = static_cast<int32_t>(digest_ranges_.size());
  digests.kernel.function = device_.kernels.digest;
  digests.kernel.shape = {.grid_x = BlocksFor(digests.parts, kDigestsPerBlock),
                          .threads = kBlockThreads};
  digests.kernel.arg_bytes = sizeof(args);
  std::memcpy(digests.kernel.args.data(), &args, sizeof(args));
  return digests;
}

absl::Status PageWork::AddDigests(LaunchRecording& recording, const Launch& launch) {
  MLA_ASSIGN_OR_RETURN(auto writes, DigestsOf(recording, launch.page_writes));
  recording.SetWriteDigests(writes);
  MLA_ASSIGN_OR_RETURN(auto reads, DigestsOf(recording, launch.page_reads));
  recording.SetReadDigests(reads);
  return absl::OkStatus();
}

absl::Status PageWork::AddTensors(LaunchRecording& recording, std::span<const TensorMove> moves,
                                  uint64_t* begun, uint64_t* lasted) {
  static_assert(LaunchRecording::kMoves <= kTensorCopies);
  if (moves.empty()) return absl::OkStatus();
  CopyTensorsArgs args = {};
  args.begun = begun;
  args.lasted = lasted;
  LaunchShape shape{
      .grid_x = 0, .threads = kBlockThreads, .overlap_predecessor = lasted != nullptr};
  for (const TensorMove& m : moves) {
    TensorCopy& copy = args.copies[args.count++];
    copy = {reinterpret_cast<uint8_t*>(m.to), reinterpret_cast<const uint8_t*>(m.from), m.bytes};
    shape.grid_x += static_cast<uint32_t>(copy.blocks());
  }
  return recording.AddKernel(device_.kernels.copy_tensors, shape, args);
}

absl::Status PageWork::AddTables(LaunchRecording& recording, const Launch& launch) {
  const std::span<const TableRange> changed = launch.table_changes;
  absl::Status inside = CheckTableRanges(changed, limits_, launch.page_tables.size());
  if (!inside.ok() || changed.empty()) return inside;
  // Ranges are merged, so that an entry named twice is copied once and no list exceeds the table.
  table_ranges_.assign(changed.begin(), changed.end());
  std::sort(table_ranges_.begin(), table_ranges_.end(),
            [](const TableRange& a, const TableRange& b) { return a.first < b.first; });
  size_t last_kept = 0;
  for (size_t i = 1; i < table_ranges_.size(); ++i) {
    TableRange& last = table_ranges_[last_kept];
    const TableRange& next = table_ranges_[i];
    if (next.first > last.first + last.count) {
      table_ranges_[++last_kept] = next;
    } else {
      last.count = std::max(last.count, next.first + next.count - last.first);
    }
  }
  table_ranges_.resize(last_kept + 1);
  int64_t entries = 0;
  for (const TableRange& r : table_ranges_) entries += r.count;
  StagedRegion& metadata = recording.metadata();
  MLA_ASSIGN_OR_RETURN(int64_t at, metadata.Take(entries * static_cast<int64_t>(sizeof(uint32_t))));
  moves_.clear();
  int64_t offset = at;
  // The entries are copied now, because the host may change them while the launch runs.
  for (const TableRange& r : table_ranges_) {
    const int64_t bytes = r.count * static_cast<int64_t>(sizeof(uint32_t));
    metadata.Write(offset, launch.page_tables.data() + r.first, static_cast<size_t>(bytes));
    moves_.push_back({device_.table_mirror.As<uint8_t>() + r.first * sizeof(uint32_t),
                      reinterpret_cast<const uint8_t*>(metadata.device(offset)), bytes});
    offset += bytes;
  }
  const size_t all = moves_.size();
  return AddMoves(recording, {&all, 1});
}

absl::Status PageWork::AddAppends(LaunchRecording& recording, std::span<const AppendRecord> records,
                                  bool next_starts_early) const {
  if (records.empty()) return absl::OkStatus();
  const int64_t count = static_cast<int64_t>(records.size());
  MLA_ASSIGN_OR_RETURN(const int64_t prefix,
                       recording.metadata().Take((count + 1) * sizeof(int32_t)));
  StagedRegion& metadata = recording.metadata();
  const auto put_first_row = [&metadata, prefix](int64_t i, int32_t first_row) {
    metadata.Write(prefix + i * int64_t{sizeof(first_row)}, &first_row, sizeof(first_row));
  };
  int32_t rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    const AppendRecord& r = records[i];
    if (r.row_dim % 8 != 0 || r.row_stride % 16 != 0 || r.layer_offset % 16 != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "append.records[", i, "]: row_dim ", r.row_dim, ", row_stride ", r.row_stride,
          ", layer_offset ", r.layer_offset, "; want multiples of 8 elements, 16 and 16 bytes"));
    }
    if (const int32_t group = TraitsOf(r.format).group;
        group > 0 && (r.row_dim - r.rope_dim) % group != 0) {
      return absl::InvalidArgumentError(absl::StrCat("append.records[", i,
                                                     "]: ", r.row_dim - r.rope_dim,
                                                     " latent values; want a multiple of ", group));
    }
    put_first_row(i, rows);
    rows += r.rows;
  }
  put_first_row(count, rows);
  if (rows == 0) return absl::OkStatus();
  const int64_t layer = records[0].layer_offset;
  MLA_ASSIGN_OR_RETURN(auto uploaded, metadata.PutEach(records, [&](AppendRecord record) {
    record.layer_offset -= layer;
    record.kv_scale = device_.RowScale(record.format, record.kv_scale);
    return record;
  }));
  AppendArgs args = {};
  args.records = uploaded;
  args.first_row = reinterpret_cast<const int32_t*>(metadata.device(prefix));
  args.page_tables = device_.table_mirror.As<uint32_t>();
  args.pool = device_.pool.As<uint8_t>() + layer;
  args.count = static_cast<int32_t>(count);
  args.next_starts_early = next_starts_early ? 1 : 0;
  args.late = recording.late_word();
  const LaunchShape shape{.grid_x = BlocksFor(rows, device_.arch->waves_per_block),
                          .threads = kBlockThreads,
                          .overlap_gate = true};
  return recording.AddKernel(device_.kernels.append, shape, args);
}

}  // namespace mla::kernels::hip
