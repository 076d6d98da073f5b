#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/printable.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/context/context.h"
#include "client/mlactl/text/nearest.h"
#include "client/mlactl/views/view_commands.h"

namespace mla::mlactl {
namespace {

constexpr char kGroup[] = "Contexts";

std::string Path() {
  return ContextsPath([](const char* name) { return std::getenv(name); });
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : base::Printable(text)) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

int List(const CommonOptions& common) {
  const auto contexts = ReadContexts(Path());
  if (!contexts.ok()) return FailUsage(contexts.status());
  std::string text =
      absl::StrFormat("%-2s%-20s %-32s %-16s %s\n", "", "context", "target", "tenant", "tls");
  std::string json = absl::StrCat("{\"current\": ", Quoted(contexts->current), ", \"contexts\": [");
  bool first = true;
  for (const auto& [name, one] : contexts->all) {
    absl::StrAppendFormat(&text, "%-2s%-20s %-32s %-16s %s\n", name == contexts->current ? "*" : "",
                          name, one.target, one.tenant, one.tls_cert.empty() ? "no" : "mutual");
    absl::StrAppend(&json, first ? "" : ", ", "{\"name\": ", Quoted(name),
                    ", \"target\": ", Quoted(one.target), ", \"tenant\": ", Quoted(one.tenant),
                    "}");
    first = false;
  }
  return Emit(common, json + "]}\n", text);
}

// Applies `change` to the file of contexts. `change` returns an error, or OK.
template <typename Change>
int Edit(Change change) {
  auto contexts = ReadContexts(Path());
  if (!contexts.ok()) return FailUsage(contexts.status());
  absl::Status status = change(&*contexts);
  if (!status.ok()) return FailUsage(status);
  status = WriteContexts(Path(), *contexts);
  return status.ok() ? kOk : Fail(status);
}

absl::Status CheckKnown(const Contexts& contexts, const std::string& name) {
  if (contexts.all.count(name) != 0) return absl::OkStatus();
  std::vector<std::string> names;
  for (const auto& one : contexts.all) names.push_back(one.first);
  return absl::NotFoundError(absl::StrCat("no context \"", name, "\"", DidYouMean(name, names)));
}

Command AddNamed(Program* program, const std::string& command, const std::string& summary,
                 const std::string& examples, std::string* name) {
  Command added =
      program->Add({.name = command, .group = kGroup, .summary = summary, .examples = examples});
  added.Word("NAME", "the context", name);
  return added;
}

}  // namespace

void AddContexts(Program* program) {
  program
      ->Add({.name = "contexts",
             .group = kGroup,
             .summary = "list servers by name; * marks the default",
             .examples = "mlactl contexts\n"})
      .Run(List);
  const auto name = std::make_shared<std::string>();
  AddNamed(program, "set-context", "keep --target, --tenant and --tls-* under a name",
           "mlactl set-context prod --target=gpu-7:50551 --tls-ca=ca.crt --tls-cert=me.crt "
           "--tls-key=me.key\n",
           name.get())
      .Run([name](const CommonOptions& common) {
        return Edit([&](Contexts* contexts) {
          contexts->all[*name] = {common.target,         common.client.tenant,
                                  common.client.tls_ca,  common.client.tls_cert,
                                  common.client.tls_key, common.client.tls_server_name};
          if (contexts->current.empty()) contexts->current = *name;
          return absl::OkStatus();
        });
      });
  AddNamed(program, "use-context", "mean this one from now on", "mlactl use-context prod\n",
           name.get())
      .Run([name](const CommonOptions&) {
        return Edit([&](Contexts* contexts) {
          contexts->current = *name;
          return CheckKnown(*contexts, *name);
        });
      });
  AddNamed(program, "delete-context", "forget one", "mlactl delete-context lab\n", name.get())
      .Run([name](const CommonOptions&) {
        return Edit([&](Contexts* contexts) {
          const absl::Status known = CheckKnown(*contexts, *name);
          contexts->all.erase(*name);
          if (contexts->current == *name) contexts->current.clear();
          return known;
        });
      });
}

}  // namespace mla::mlactl
