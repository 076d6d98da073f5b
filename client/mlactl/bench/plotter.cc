#include "client/mlactl/bench/plotter.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::mlactl {
namespace {

constexpr char kName[] = "mlactl-plot";
constexpr size_t kMaxMessage = 4096;  // bytes of what the program says that are shown

// A file without a name, for the standard streams of a program: unlike a pipe it cannot fill up or
// break.
class Scratch final {
 public:
  Scratch() : descriptor_(memfd_create("mlactl", MFD_CLOEXEC)) {}
  ~Scratch() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  int descriptor() const { return descriptor_; }

  // Writes all of it, and lets a reader begin at its first byte.
  bool Fill(std::string_view text) {
    while (!text.empty()) {
      const ssize_t written = write(descriptor_, text.data(), text.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return false;
      text.remove_prefix(static_cast<size_t>(written));
    }
    return lseek(descriptor_, 0, SEEK_SET) == 0;
  }

  std::string First(size_t bytes) const {
    std::string text(bytes, '\0');
    const ssize_t count = pread(descriptor_, text.data(), text.size(), 0);
    text.resize(count > 0 ? static_cast<size_t>(count) : 0);
    return text;
  }

 private:
  const int descriptor_;
};

// Runs the program with `input` as its standard input until it ends. If it fails, the error is the
// first of its standard error.
absl::Status Run(const std::string& program, std::vector<std::string> arguments,
                 const std::string& input) {
  Scratch in, errors;
  if (errors.descriptor() < 0 || !in.Fill(input)) {
    return absl::ResourceExhaustedError(absl::StrCat(kName, ": ", std::strerror(errno)));
  }
  arguments.insert(arguments.begin(), program);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.descriptor(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors.descriptor(), STDERR_FILENO);
  pid_t child = -1;
  const int error = posix_spawnp(&child, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(program, " does not start (", std::strerror(error),
                     "): it comes with mlactl and needs Python with matplotlib; without it, "
                     "--json FILE keeps the report for a machine that has it"));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return absl::InternalError(absl::StrCat(kName, ": ", std::strerror(errno)));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  const std::string said(absl::StripAsciiWhitespace(errors.First(kMaxMessage)));
  if (!said.empty()) return absl::FailedPreconditionError(said);
  return absl::FailedPreconditionError(
      WIFSIGNALED(status) ? absl::StrCat(program, " was ended by signal ", WTERMSIG(status))
                          : absl::StrCat(program, " ended with status ", WEXITSTATUS(status)));
}

// Returns the path of mlactl-plot next to this program, or its bare name, which is looked up in
// PATH.
std::string ProgramPath() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return kName;
  const std::string neighbour = self.parent_path() / kName;
  return access(neighbour.c_str(), X_OK) == 0 ? neighbour : kName;
}

}  // namespace

absl::StatusOr<Plotter> Plotter::Find(std::string file) {
  Plotter plotter(ProgramPath(), std::move(file));
  MLA_RETURN_IF_ERROR(Run(plotter.program_, {"--check", "--", plotter.file_}, ""));
  return plotter;
}

absl::Status Plotter::Draw(const std::string& report) const {
  return Run(program_, {"--", "-", file_}, report);
}

}  // namespace mla::mlactl
