#include "tests/conformance/pages/page_check.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/types/launch.h"

namespace mla::conformance {
namespace {

using kernels::Launch;
using kernels::PageRange;
using kernels::PageTransfer;

constexpr int64_t kMib = 1 << 20;
// Sizes and offsets at no particular boundary, together less than kMib.
constexpr int64_t kSizes[] = {1, 256, 4103, 0, 900'000};
constexpr int64_t kFirst = 3;

// Transfers of kSizes, one after the other in both memories, with a gap in the pool.
std::vector<PageTransfer> Transfers(int64_t pool_offset, std::byte* host) {
  std::vector<PageTransfer> transfers;
  for (const int64_t bytes : kSizes) {
    transfers.push_back({pool_offset, bytes, host});
    pool_offset += bytes + 5;
    host += bytes;
  }
  return transfers;
}

std::string CheckRefusal(kernels::AttentionBackend& backend, int64_t pool_bytes, std::byte* host) {
  const PageTransfer outside[] = {{pool_bytes - 8, 16, host}, {-8, 8, host}, {0, -1, host}};
  for (const PageTransfer& transfer : outside) {
    Launch write, read;
    write.page_writes = read.page_reads = {&transfer, 1};
    for (const Launch& launch : {write, read}) {
      if (!absl::IsInvalidArgument(backend.Submit(0, launch))) {
        return "a page transfer that leaves the pool is not refused";
      }
    }
  }
  return "";
}

// Launch 0 writes `sent`, copies it elsewhere in the pool and reads it there. Launch 1 is submitted
// at once; it writes `later` over both places and reads one of them.
std::string CheckOrder(kernels::AttentionBackend& backend, std::span<std::byte> sent,
                       std::span<std::byte> back) {
  std::vector<std::byte> later(sent.size(), std::byte{0x5a}), last(sent.size());
  const std::vector<PageTransfer> writes = Transfers(kFirst, sent.data());
  const std::vector<PageTransfer> reads = Transfers(kFirst + 2 * kMib, back.data());
  const PageRange copy{2 * kMib, kMib, 0};
  Launch first;
  first.page_writes = writes;
  first.pages = {&copy, 1};
  first.page_reads = reads;
  std::vector<PageTransfer> over = Transfers(kFirst, later.data());
  const std::vector<PageTransfer> over_copies = Transfers(kFirst + 2 * kMib, later.data());
  over.insert(over.end(), over_copies.begin(), over_copies.end());
  const std::vector<PageTransfer> again = Transfers(kFirst + 2 * kMib, last.data());
  Launch second;
  second.page_writes = over;
  second.page_reads = again;
  absl::Status status = backend.Submit(0, first);
  if (status.ok()) status = backend.Submit(1, second);
  if (status.ok()) status = backend.Wait(0).status();
  if (status.ok()) status = backend.Wait(1).status();
  if (!status.ok()) return "page transfers: " + status.ToString();
  if (!std::equal(sent.begin(), sent.end(), back.begin(), back.end())) {
    return "pages that were written and copied do not hold the bytes that were sent";
  }
  return last == later ? "" : "pages do not hold the rows of a later launch";
}

// One range fills many places of the pool and leaves the bytes between them.
std::string CheckPlaces(kernels::AttentionBackend& backend) {
  constexpr int64_t kStride = 4103, kBytes = 1000;
  constexpr int32_t kPlaces = 61;
  std::vector<std::byte> first(kMib), second(kMib), back(kMib);
  for (size_t i = 0; i < first.size(); ++i) {
    first[i] = static_cast<std::byte>(i * 5 + i / 253);
    second[i] = static_cast<std::byte>(i * 3 + i / 241 + 1);
  }
  const PageTransfer writes[] = {{0, kMib, first.data()}, {kMib, kMib, second.data()}};
  const PageTransfer read{kMib, kMib, back.data()};
  const PageRange ranges[] = {{kMib + 7, kBytes, 7, kPlaces, kStride},
                              {kMib + 7 + kBytes, 2, PageRange::kZeros, kPlaces, kStride}};
  Launch launch;
  launch.page_writes = writes;
  launch.pages = ranges;
  launch.page_reads = {&read, 1};
  absl::Status status = backend.Submit(0, launch);
  if (status.ok()) status = backend.Wait(0).status();
  if (!status.ok()) return "page ranges of many places: " + status.ToString();
  for (int32_t place = 0; place < kPlaces; ++place) {
    const int64_t at = 7 + place * kStride;
    std::copy_n(first.begin() + at, kBytes, second.begin() + at);
    std::fill_n(second.begin() + at + kBytes, 2, std::byte{0});
  }
  return back == second ? "" : "a range of many places has filled something else";
}

// Digests describe the copied bytes: of rows as they are sent, and of rows as they lie in the pool
// when they are read, some of them cleared by then.
std::string CheckDigests(kernels::AttentionBackend& backend, std::span<std::byte> sent,
                         std::span<std::byte> back) {
  // Many parts; one short part; whole parts only; and parts with a short last one.
  constexpr int64_t kGranules[] = {1024, 1, 16, 0, 17, 999};
  const PageRange cleared{5 * kernels::kPageGranuleBytes, 1, PageRange::kZeros};
  std::vector<kernels::PartDigest> in(kMib / kernels::kDigestPartBytes), out(in.size());
  std::vector<PageTransfer> writes, reads;
  int64_t offset = 0, part = 0;
  for (const int64_t granules : kGranules) {
    const int64_t bytes = granules * kernels::kPageGranuleBytes;
    writes.push_back({offset, bytes, sent.data() + offset, in.data() + part});
    reads.push_back({offset, bytes, back.data() + offset, out.data() + part});
    offset += bytes;
    part += kernels::DigestParts(bytes);
  }
  Launch launch;
  launch.page_writes = writes;
  launch.pages = {&cleared, 1};
  launch.page_reads = reads;
  absl::Status status = backend.Submit(0, launch);
  if (status.ok()) status = backend.Wait(0).status();
  if (!status.ok()) return "page transfers with digests: " + status.ToString();
  for (const std::vector<PageTransfer>& transfers : {writes, reads}) {
    for (const PageTransfer& t : transfers) {
      for (int64_t begin = 0; begin < t.bytes; begin += kernels::kDigestPartBytes) {
        const int64_t size = std::min(kernels::kDigestPartBytes, t.bytes - begin);
        const std::span bytes(t.host + begin, static_cast<size_t>(size));
        if (t.digests[begin / kernels::kDigestPartBytes] != kernels::DigestOfPart(bytes)) {
          return "a digest of a page transfer is of something else";
        }
      }
    }
  }
  return in == out ? "the digest of a row that was cleared is as before" : "";
}

}  // namespace

std::string CheckPageTransfers(kernels::AttentionBackend& backend, int64_t pool_bytes) {
  size_t bytes = 0;
  for (const int64_t size : kSizes) bytes += static_cast<size_t>(size);
  // In memory that the device reaches directly, and in other memory.
  auto reached = backend.AllocateHost(2 * bytes);
  if (!reached.ok()) return reached.status().ToString();
  std::vector<std::byte> other(2 * bytes);
  for (const std::span<std::byte> memory : {(*reached)->bytes(), std::span(other)}) {
    for (size_t i = 0; i < bytes; ++i) memory[i] = static_cast<std::byte>(i * 7 + i / 251);
    std::string wrong = CheckOrder(backend, memory.subspan(0, bytes), memory.subspan(bytes, bytes));
    if (wrong.empty()) {
      wrong = CheckDigests(backend, memory.subspan(0, bytes), memory.subspan(bytes, bytes));
    }
    if (!wrong.empty()) return wrong;
  }
  std::string wrong = CheckPlaces(backend);
  return wrong.empty() ? CheckRefusal(backend, pool_bytes, other.data()) : wrong;
}

}  // namespace mla::conformance
