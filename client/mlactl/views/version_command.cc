#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/version/version.h"
#include "client/cpp/client.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/views/view_commands.h"

namespace mla::mlactl {
namespace {

int Version(const CommonOptions& common, bool only_this) {
  const std::string own = base::FullVersion();
  std::string text = absl::StrCat("mlactl ", own, "\nrevision ", base::Revision(), "\n");
  std::string json = absl::StrCat("{\"mlactl\": \"", own, "\", \"revision\": \"", base::Revision(),
                                  "\", \"api\": \"", base::kApiVersion, "\"");
  int code = kOk;
  if (!only_this) {
    const auto client = Connect(common);
    if (client.ok()) {
      const v1::GetServerInfoReply info = WithPlainTexts((*client)->info());
      absl::StrAppend(&text, "server ", info.server_version(), " at ", common.target, ", api ",
                      info.api_version(), "\n");
      absl::StrAppend(&json, ", \"server\": \"", info.server_version(), "\"");
    } else {
      code = Fail(client.status());
    }
  }
  const int written = Emit(common, json + "}\n", text);
  return written != kOk ? written : code;
}

}  // namespace

void AddVersion(Program* program) {
  const auto only_this = std::make_shared<bool>(false);
  Command command = program->Add({.name = "version",
                                  .group = "State of a server",
                                  .summary = "show the versions of mlactl and of the server",
                                  .examples = "mlactl version\nmlactl version --client\n"});
  command.Flag("client", "show mlactl's version alone, without a server", only_this.get());
  command.Run([only_this](const CommonOptions& common) { return Version(common, *only_this); });
}

}  // namespace mla::mlactl
