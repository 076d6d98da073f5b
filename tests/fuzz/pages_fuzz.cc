// Rows arrive from elsewhere, in files and streams. Accepted rows must lie inside the pages that
// they are for, and input with one changed byte must be refused as a whole.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cpp/pages_file.h"
#include "server/pages/page_stream.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

constexpr int64_t kChunk = 64;

class MemoryFile {
 public:
  MemoryFile() : descriptor_(memfd_create("pages", MFD_CLOEXEC)) {}
  ~MemoryFile() { close(descriptor_); }
  bool Fill(const std::string& bytes) const {
    return ftruncate(descriptor_, 0) == 0 &&
           pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
  }
  std::string path() const { return absl::StrCat("/proc/self/fd/", descriptor_); }

 private:
  const int descriptor_;
};

const MemoryFile& File() {
  static const MemoryFile file;
  return file;
}

scheduler::ModelSpec Model() {
  scheduler::ModelSpec model;
  model.id = std::string(1, 'm');  // GCC 12 warns of the literal
  model.geometry = {2, 3, 1, 0, 0};
  model.layers = 2;
  model.softmax_scale = 0.5;
  model.page_size = 4;
  model.attention = kernels::AttentionKind::kWindow;
  model.window = 3;
  model.ratios = {2, 4};
  model.tail_bytes = 5;
  return model;
}

// Rows of both layers, then rows of a window, then a tail.
scheduler::MovingPages Pages() {
  scheduler::MovingPages pages;
  pages.layout = kvcache::MakeLayout({8, 4, 2, kernels::KvFormat::kBf16});
  pages.window_layout = kvcache::MakeLayout({8, 2, 2, kernels::KvFormat::kBf16});
  const scheduler::ModelSpec model = Model();
  pages.tags.geometry = model.geometry;
  pages.tags.layers = model.layers;
  pages.tags.page_size = model.page_size;
  pages.tags.group_bytes = 64;
  pages.tags.rows = 6;
  pages.tags.window = model.window;
  pages.tags.ratios = model.ratios;
  pages.tags.tail_bytes = model.tail_bytes;
  pages.tags.tail_position = 6;
  pages.tags.sinks = std::vector<float>{0.5f, -1.0f, scheduler::kNoSink, 2.0f};
  return pages;
}
constexpr size_t kPayloads = 6 * 16 + 4 * 16 + 5;  // bytes of the rows, of the window's rows 2 to
                                                   // 5, of the tail

std::string CheckPlace(const scheduler::MovingPages& pages, const server::PagePlace& place,
                       size_t bytes) {
  const server::StreamGroup& group = place.group;
  const bool tail = group.content == v1::PAGE_CONTENT_TAIL;
  const int64_t size = tail ? 1 : server::PageSizeOf(pages, group);
  const bool named = tail ? group.first_row == 6 && group.rows == 0
                          : group.rows >= 1 && group.rows <= size &&
                                group.first_row == place.page * size &&
                                group.first_row + group.rows <= pages.tags.rows;
  if (!named) return "a chunk of rows that the header does not name";
  const auto pieces = server::PiecesOf(pages, group);
  return kvcache::IsPart(pieces, place.offset, static_cast<int64_t>(bytes))
             ? ""
             : "a chunk without rows";
}

std::string CheckHeader(const v1::PagesHeader& header) {
  const scheduler::Limits limits;
  scheduler::PageTags tags;
  if (!server::ParseHeader(header, limits, &tags).ok()) return "";
  if (tags.rows < 1 || tags.rows > limits.max_sequence_rows || tags.first_row < 0 ||
      tags.first_row > limits.max_sequence_rows || tags.group_bytes < 1) {
    return "tags out of range";
  }
  const size_t sinks = tags.sinks ? tags.sinks->size() : 0;
  if (sinks != 0 && sinks != static_cast<size_t>(tags.layers) * tags.geometry.num_heads) {
    return "sinks for a wrong number of layers or heads";
  }
  return "";
}

// Reads all of it. `whole` receives true if every part was accepted.
std::string Read(const std::string& input, bool* whole) {
  *whole = false;
  if (!File().Fill(input)) return "memfd is full";
  auto file = client::PagesFileReader::Open(File().path());
  if (!file.ok()) return file.status().message().empty() ? "a refusal without words" : "";
  const scheduler::MovingPages pages = Pages();
  server::PageStreamReader reader(pages, kChunk);
  std::optional<server::PagePlace> place;
  size_t payload_bytes = 0;
  for (size_t n = 0;; ++n) {
    const auto part = (*file)->Next();
    if (!part.ok()) return part.status().message().empty() ? "a refusal without words" : "";
    if (!part->has_value()) break;
    if (n > input.size()) return "more parts than bytes";
    if ((*part)->has_header()) {
      if (std::string fault = CheckHeader((*part)->header()); !fault.empty()) return fault;
      if (n == 0) continue;
    }
    const absl::Status status = reader.Add(**part, &place);
    if (!status.ok()) return status.message().empty() ? "a refusal without words" : "";
    if (!place) continue;
    const size_t bytes = (*part)->chunk().payload().size();
    payload_bytes += bytes;
    if (std::string fault = CheckPlace(pages, *place, bytes); !fault.empty()) return fault;
  }
  *whole = reader.Finish().ok();
  return *whole && payload_bytes != kPayloads ? "a whole stream of another size" : "";
}

std::string Framed(const v1::PagesPart& part) {
  const std::string bytes = part.SerializeAsString();
  std::string text;
  for (int i = 0; i < 4; ++i) text += static_cast<char>(bytes.size() >> 8 * i);
  return text + bytes;
}

std::string Seed() {
  const scheduler::MovingPages pages = Pages();
  server::PageDigests digests(pages.tags);
  v1::PagesPart part;
  server::FillHeader(Model(), pages.tags, part.mutable_header());
  scheduler::PageTags tags;
  Require(std::string(server::ParseHeader(part.header(), scheduler::Limits(), &tags).message()));
  Require(tags.sinks == pages.tags.sinks ? "" : "sinks of the seed's header are lost");
  std::string text =
      absl::StrCat(client::kPagesFileMagic, std::string("\1\0\0\0", 4), Framed(part));
  const int64_t groups = server::GroupCount(pages);
  for (int64_t index = 0; index < groups; ++index) {
    const server::StreamGroup group = server::GroupAt(pages, index);
    part.mutable_group()->set_first_row(static_cast<uint64_t>(group.first_row));
    part.mutable_group()->set_rows(static_cast<uint32_t>(group.rows));
    part.mutable_group()->set_content(group.content);
    text += Framed(part);
    digests.BeginGroup(group);
    for (const kvcache::GroupPiece& piece : server::PiecesOf(pages, group)) {
      const std::string payload(static_cast<size_t>(piece.bytes),
                                static_cast<char>('a' + piece.layer));
      part.mutable_chunk()->set_payload(payload);
      text += Framed(part);
      digests.Add(payload);
    }
    part.mutable_group_end()->set_sha256(digests.EndGroup());
    text += Framed(part);
  }
  part.mutable_trailer()->set_groups(static_cast<uint64_t>(groups));
  part.mutable_trailer()->set_sha256(digests.End());
  return text + Framed(part);
}

std::string CheckOne(const std::string& input) {
  bool whole = false;
  std::string fault = Read(input, &whole);
  return fault;
}

}  // namespace

FuzzTarget TargetUnderTest() {
  FuzzTarget target;
  target.executions = 3000;
  const std::string seed = Seed();
  bool whole = false;
  Require(Read(seed, &whole));
  Require(whole ? "" : "a seed that is not whole");
  // Every bit after the header matters, because digests cover the payloads and each other.
  const size_t chunk = seed.find(std::string(32, 'a'));
  Require(chunk == std::string::npos ? "no payload in the seed" : "");
  std::string changed = seed;
  changed[chunk] ^= 1;
  Require(Read(changed, &whole));
  Require(whole ? "a changed payload was taken" : "");
  target.seeds = {seed, seed.substr(0, chunk)};
  return target;
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mla::fuzz::Require(mla::fuzz::CheckOne({reinterpret_cast<const char*>(data), size}));
  return 0;
}
