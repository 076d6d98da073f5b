// Checkpoint files come back from a disk. Every frame that a reader returns must be as written and
// in order, and every refusal must have a reason.
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/pages/checkpoint_file.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

// A folder that is removed when the process ends.
class Folder {
 public:
  Folder() {
    const char* const base = getenv("TEST_TMPDIR");
    path_ = absl::StrCat(base == nullptr ? "/tmp" : base, "/checkpoint_fuzz.XXXXXX");
    Require(mkdtemp(path_.data()) == nullptr ? "no folder" : "");
  }
  ~Folder() {
    unlink(File().c_str());
    rmdir(path_.c_str());
  }
  std::string File() const { return absl::StrCat(path_, "/a.ckpt"); }

 private:
  std::string path_;
};

const Folder& Place() {
  static const Folder folder;
  return folder;
}

server::CheckpointKey Key() {
  server::CheckpointKey key;
  key.fill(7);
  return key;
}

const std::vector<std::string>& Frames() {
  static const auto* const kFrames =
      new std::vector<std::string>{"a header", std::string(300, 'x'), "", "a trailer"};
  return *kFrames;
}

// Counts the frames that were returned before the end or the refusal.
std::string Read(const std::string& input, size_t* frames) {
  *frames = 0;
  std::ofstream(Place().File(), std::ios::binary | std::ios::trunc) << input;
  auto file = server::CheckpointReader::Open(Place().File(), Key(), {1 << 20, 1 << 20});
  if (!file.ok()) return file.status().message().empty() ? "a refusal without words" : "";
  for (std::string frame;; ++*frames) {
    const auto read = (*file)->Next(&frame);
    if (!read.ok()) return read.status().message().empty() ? "a refusal without words" : "";
    if (!*read) return "";
    if (*frames >= Frames().size()) return "more frames than were written";
    if (frame != Frames()[*frames]) return "a frame that was not written";
  }
}

std::string Seed() {
  const std::string path = Place().File();
  auto file = server::CheckpointWriter::Create(path, path + ".part", Key());
  Require(file.ok() ? "" : std::string(file.status().message()));
  for (const std::string& frame : Frames()) Require((*file)->Add(frame).ok() ? "" : "Add");
  Require((*file)->Sync().ok() && (*file)->Publish().ok() ? "" : "Publish");
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

FuzzTarget TargetUnderTest() {
  FuzzTarget target;
  target.executions = 1500;
  const std::string seed = Seed();
  size_t frames = 0;
  Require(Read(seed, &frames));
  Require(frames == Frames().size() ? "" : "a seed that is not whole");
  std::string changed = seed;
  changed[seed.size() / 2] ^= 1;
  Require(Read(changed, &frames));
  Require(frames == 1 ? "" : "a changed frame was given out");
  target.seeds = {seed, seed.substr(0, 40)};
  return target;
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  size_t frames = 0;
  mla::fuzz::Require(mla::fuzz::Read({reinterpret_cast<const char*>(data), size}, &frames));
  return 0;
}
