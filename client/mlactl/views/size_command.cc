#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/text/units.h"
#include "client/mlactl/views/sizing.h"
#include "client/mlactl/views/view_commands.h"

namespace mla::mlactl {
namespace {

struct SizeOptions {
  std::string model = KnownModels()[0].name;
  std::string memory = "256GB", link;
  Load load;
};

std::string Text(const ModelSize& model, const Load& load, const Sizing& size) {
  std::string text;
  const auto line = [&](const char* name, const std::string& value) {
    absl::StrAppendFormat(&text, "%-30s %s\n", name, value);
  };
  line("model", absl::StrCat(model.name, ": ", model.layers, " layers, ", model.heads, " heads"));
  line("a token in the cache", absl::StrCat(size.token_bytes, " bytes, ", load.format));
  line("a server's cache",
       absl::StrCat(BytesForPeople(static_cast<double>(load.memory_bytes)), ", ",
                    CountForPeople(static_cast<double>(size.server_tokens)), " tokens"));
  line("conversations on a server",
       absl::StrCat(size.server_sessions, ", each of ", load.tokens, " tokens"));
  line("weights for prefill", BytesForPeople(static_cast<double>(size.weight_bytes)));
  line("a decoded token on the wire",
       BytesForPeople(static_cast<double>(size.step_bytes)) + " (EXPANDED, bf16)");
  if (load.tokens_per_second > 0) {
    line("the load on the wire",
         BytesForPeople(size.wire_bytes_per_second) + "/s, all servers together");
  }
  if (size.server_sessions == 0) {
    line("servers", "none is enough: a conversation does not fit into one server");
    return text;
  }
  line("servers for the memory", absl::StrCat(size.servers_for_memory));
  if (size.servers_for_link > 0) line("servers for the link", absl::StrCat(size.servers_for_link));
  line("servers", absl::StrCat(size.servers));
  return text;
}

std::string Json(const ModelSize& model, const Load& load, const Sizing& size) {
  return absl::StrFormat(
      "{\"model\": \"%s\", \"format\": \"%s\", \"row_bytes\": %d, \"token_bytes\": %d,\n"
      " \"server_tokens\": %d, \"server_sessions\": %d, \"weight_bytes\": %d, \"step_bytes\": %d,\n"
      " \"wire_bytes_per_second\": %.0f, \"servers_for_memory\": %d, \"servers_for_link\": %d,\n"
      " \"servers\": %d}\n",
      model.name, load.format, size.row_bytes, size.token_bytes, size.server_tokens,
      size.server_sessions, size.weight_bytes, size.step_bytes, size.wire_bytes_per_second,
      size.servers_for_memory, size.servers_for_link, size.servers);
}

int RunSize(const CommonOptions& common, const SizeOptions& options) {
  Load load = options.load;
  load.memory_bytes = SizeOf(options.memory);
  if (load.memory_bytes == 0) {
    return FailUsage(absl::InvalidArgumentError(
        absl::StrCat("--memory: got \"", options.memory, "\", must be a size as 288GB or 256GiB")));
  }
  if (!options.link.empty()) {
    load.link_bytes_per_second = static_cast<double>(SizeOf(options.link));
    if (load.link_bytes_per_second == 0) {
      return FailUsage(absl::InvalidArgumentError(absl::StrCat(
          "--link: got \"", options.link, "\", must be a size a second as 4GB or 12GiB")));
    }
  }
  const ModelSize& model = *FindModel(options.model);
  const Sizing size = SizeUp(model, load);
  return Emit(common, Json(model, load, size), Text(model, load, size));
}

}  // namespace

void AddSize(Program* program) {
  const auto options = std::make_shared<SizeOptions>();
  options->load.sessions = 1;
  options->load.tokens = 32768;
  Command command = program->Add(
      {.name = "size",
       .group = "Planning",
       .summary = "compute how many servers a load needs, without one",
       .examples = "mlactl size --model=deepseek-v3 --memory=256GB --sessions=200 --tokens=142000\n"
                   "mlactl size --kv-format=fp8_row --sessions=64 --rate=2000 --link=4GB\n",
       .notes =
           "Conversations are counted as if they shared no prefix; sharing needs less. The wire\n"
           "is that between hosts: on one host tensors lie in shared memory.\n"});
  std::vector<std::string> names;
  for (const ModelSize& model : KnownModels()) names.push_back(model.name);
  command.Choice({"model", "NAME", "a known model (default deepseek-v3)"}, names, &options->model);
  command.Choice({"kv-format", "NAME", "bf16 (default), fp8_row or fp8_tensor"},
                 {"bf16", "fp8_row", "fp8_tensor"}, &options->load.format);
  command.Text({"memory", "SIZE", "memory of one server for the cache (default 256GB)"},
               &options->memory);
  command.Number({"sessions", "N", "conversations at a time (default 1)"}, 1, 1'000'000'000,
                 &options->load.sessions);
  command.Number({"tokens", "N", "tokens of each conversation (default 32768)"}, 1, 1'000'000'000,
                 &options->load.tokens);
  command.Real({"rate", "X", "tokens decoded a second, all together (default 0)"}, 0, 1e9,
               &options->load.tokens_per_second);
  command.Text({"link", "SIZE", "bytes a second to one server (default: not counted)"},
               &options->link);
  command.Run([options](const CommonOptions& common) { return RunSize(common, *options); });
}

}  // namespace mla::mlactl
