#include "client/mlactl/context/context.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

namespace mla::mlactl {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMostFileBytes = size_t{1} << 20;

struct Field {
  const char* key;
  const char* variable;
  std::string Connection::*member;
};
constexpr Field kFields[] = {
    {"target", "MLA_TARGET", &Connection::target},
    {"tenant", "MLA_CLIENT_TENANT", &Connection::tenant},
    {"tls_ca", "MLA_CLIENT_CA", &Connection::tls_ca},
    {"tls_cert", "MLA_CLIENT_CERT", &Connection::tls_cert},
    {"tls_key", "MLA_CLIENT_KEY", &Connection::tls_key},
    {"tls_server_name", "MLA_CLIENT_SERVER_NAME", &Connection::tls_server_name},
};

std::string Value(const Environment& environment, const char* name) {
  const char* const value = environment(name);
  return value == nullptr ? "" : value;
}

// Copies each field from `other` that is empty in `connection`.
void Fill(const Connection& other, Connection* connection) {
  for (const Field& field : kFields) {
    if ((connection->*field.member).empty()) connection->*field.member = other.*field.member;
  }
}

absl::Status Malformed(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

}  // namespace

std::string ContextsPath(const Environment& environment) {
  if (std::string path = Value(environment, "MLA_CLIENT_CONTEXTS"); !path.empty()) return path;
  std::string folder = Value(environment, "XDG_CONFIG_HOME");
  if (folder.empty()) {
    folder = Value(environment, "HOME");
    if (folder.empty()) return "";
    folder += "/.config";
  }
  return folder + "/mlactl/contexts.json";
}

absl::StatusOr<Contexts> ReadContexts(const std::string& path) {
  Contexts contexts;
  std::ifstream file(path, std::ios::binary);
  if (path.empty() || !file) return contexts;
  std::string text(kMostFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMostFileBytes) return Malformed(path, "has more than a megabyte");
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Malformed(path, "is not a JSON object");
  if (const auto current = json.find("current"); current != json.end()) {
    if (!current->is_string()) return Malformed(path, "current: must be a text");
    contexts.current = current->get<std::string>();
  }
  const auto all = json.find("contexts");
  if (all == json.end() || !all->is_object()) return Malformed(path, "contexts: must be an object");
  for (const auto& [name, one] : all->items()) {
    if (!one.is_object()) return Malformed(path, absl::StrCat("contexts.", name, ": no object"));
    Connection& connection = contexts.all[name];
    for (const Field& field : kFields) {
      const auto value = one.find(field.key);
      if (value == one.end()) continue;
      if (!value->is_string()) {
        return Malformed(path, absl::StrCat("contexts.", name, ".", field.key, ": must be a text"));
      }
      connection.*field.member = value->get<std::string>();
    }
  }
  return contexts;
}

absl::Status WriteContexts(const std::string& path, const Contexts& contexts) {
  if (path.empty())
    return absl::FailedPreconditionError("contexts: neither HOME nor a path is set");
  Json json = {{"current", contexts.current}, {"contexts", Json::object()}};
  for (const auto& [name, connection] : contexts.all) {
    Json one = Json::object();
    for (const Field& field : kFields) {
      if (!(connection.*field.member).empty()) one[field.key] = connection.*field.member;
    }
    json["contexts"][name] = one;
  }
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::path(path).has_parent_path()) fs::create_directories(fs::path(path).parent_path(), error);
  const std::string fresh = path + ".new";
  {
    std::ofstream file(fresh, std::ios::binary | std::ios::trunc);
    fs::permissions(fresh, fs::perms::owner_read | fs::perms::owner_write, error);
    file << json.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
    if (!file.flush()) return Malformed(fresh, "cannot be written");
  }
  if (std::rename(fresh.c_str(), path.c_str()) != 0) return Malformed(path, std::strerror(errno));
  return absl::OkStatus();
}

absl::StatusOr<Connection> Complete(const Connection& given, const std::string& name,
                                    const Environment& environment) {
  Connection connection = given;
  for (const Field& field : kFields) {
    std::string& value = connection.*field.member;
    if (value.empty()) value = Value(environment, field.variable);
  }
  std::string wanted = name.empty() ? Value(environment, "MLA_CLIENT_CONTEXT") : name;
  if (wanted.empty() && !connection.target.empty()) return connection;
  const std::string path = ContextsPath(environment);
  MLA_ASSIGN_OR_RETURN(auto contexts, ReadContexts(path));
  if (wanted.empty()) wanted = contexts.current;
  if (wanted.empty()) return connection;
  const auto entry = contexts.all.find(wanted);
  if (entry == contexts.all.end()) {
    return absl::NotFoundError(
        absl::StrCat("--server-context: got \"", wanted, "\", not in ", path));
  }
  // A context that the command line names outweighs variables, which a shell may set for every
  // command.
  if (!name.empty()) {
    connection = given;
    Fill(entry->second, &connection);
    return connection;
  }
  Fill(entry->second, &connection);
  return connection;
}

}  // namespace mla::mlactl
