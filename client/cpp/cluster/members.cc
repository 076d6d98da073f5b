#include "client/cpp/cluster/members.h"

#include <google/protobuf/util/json_util.h>

#include <chrono>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "client/cpp/cluster/faults.h"

namespace mla::client {
namespace {

absl::Status Wrong(const std::string& field, const std::string& got, const std::string& limit) {
  return RefuseValue(absl::StrCat("member.", field), got, limit);
}

absl::Status CheckText(const std::string& field, const std::string& text) {
  bool plain = text.size() <= kMostText;
  for (const unsigned char one : text) plain = plain && one >= 0x20 && one != 0x7f;
  if (plain) return absl::OkStatus();
  return Wrong(field, absl::StrCat(text.size(), " bytes"),
               absl::StrCat("text of at most ", kMostText, " printable characters"));
}

bool HasRestarted(const Member& before, const Member& after) {
  return before.boot_id() != after.boot_id() && before.boot_id() != 0 && after.boot_id() != 0;
}

}  // namespace

double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

absl::Status CheckMember(const Member& member) {
  if (member.address().empty()) return Wrong("address", "none", "HOST:PORT or unix:PATH");
  const std::pair<const char*, const std::string*> texts[] = {{"address", &member.address()},
                                                              {"node", &member.node()},
                                                              {"socket", &member.socket()},
                                                              {"device", &member.device()},
                                                              {"version", &member.version()}};
  for (const auto& [field, text] : texts) {
    MLA_RETURN_IF_ERROR(CheckText(field, *text));
  }
  if (member.models_size() > kMostDigests) {
    return Wrong("models", absl::StrCat(member.models_size()),
                 absl::StrCat("at most ", kMostDigests));
  }
  for (const std::string& digest : member.models()) {
    MLA_RETURN_IF_ERROR(CheckText("models", digest));
  }
  return absl::OkStatus();
}

absl::StatusOr<Member> ParseMember(std::string_view json) {
  if (json.size() > kMostValueBytes) {
    return Wrong("value", absl::StrCat(json.size(), " bytes"),
                 absl::StrCat("at most ", kMostValueBytes));
  }
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  Member member;
  const auto parsed = google::protobuf::util::JsonStringToMessage(
      google::protobuf::StringPiece(json.data(), json.size()), &member, options);
  if (!parsed.ok()) return Wrong("value", std::string(parsed.message()), "JSON of a member");
  MLA_RETURN_IF_ERROR(CheckMember(member));
  return member;
}

// Numbers are written as such. The JSON of protobuf has strings in their place, which clients in
// other languages do not take.
std::string MemberJson(const Member& member) {
  const auto text = [](const std::string& value) {
    std::string quoted = "\"";
    for (const char one : value) {
      if (one == '"' || one == '\\') quoted += '\\';
      quoted += one;
    }
    return quoted + '"';
  };
  std::string models = absl::StrJoin(member.models(), ",", [&](std::string* out, const auto& one) {
    absl::StrAppend(out, text(one));
  });
  return absl::StrCat(
      "{\"address\":", text(member.address()), ",\"boot_id\":", member.boot_id(),
      ",\"bytes_cached\":", member.bytes_cached(), ",\"bytes_free\":", member.bytes_free(),
      ",\"bytes_total\":", member.bytes_total(), ",\"device\":", text(member.device()),
      ",\"draining\":", member.draining() ? "true" : "false", ",\"models\":[", models,
      "],\"node\":", text(member.node()), ",\"sequences\":", member.sequences(),
      ",\"socket\":", text(member.socket()), ",\"version\":", text(member.version()), "}");
}

Member MemberAt(const std::string& address) {
  Member member;
  member.set_address(address);
  return member;
}

MemberList::MemberList(Read read, OnGone on_gone, MemberListOptions options)
    : read_(std::move(read)), on_gone_(std::move(on_gone)), options_(std::move(options)) {}

absl::Status MemberList::Start() {
  const auto period = std::chrono::duration<double>(options_.refresh_s);
  try {
    thread_ = std::thread([this, period] {
      MutexLock lock(mutex_);
      while (!stopped_.WaitFor(lock, period,
                               [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; })) {
        lock.Unlock();
        Refresh().IgnoreError();  // All says it once the list is too old
        lock.Lock();
      }
    });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no thread to read the registry: ", error.what()));
  }
  return absl::OkStatus();
}

absl::Status MemberList::Refresh() {
  absl::StatusOr<std::vector<Member>> answer = read_();
  if (answer.ok() && answer->size() > kMostMembers) {
    answer = RefuseValue("members", absl::StrCat(answer->size()),
                         absl::StrCat("at most ", kMostMembers));
  }
  std::vector<std::string> gone;
  {
    const MutexLock lock(mutex_);
    error_ = answer.status();
    if (!answer.ok()) return error_;
    std::map<std::string, Member> before = std::exchange(members_, {});
    for (Member& one : *answer) members_.insert_or_assign(one.address(), std::move(one));
    answered_ = true;
    answer_time_s_ = options_.now();
    for (const auto& [address, one] : before) {
      const auto after = members_.find(address);
      if (after == members_.end() || HasRestarted(one, after->second)) gone.push_back(address);
    }
  }
  if (!gone.empty() && on_gone_) on_gone_(gone);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Member>> MemberList::All() const {
  const MutexLock lock(mutex_);
  const double age_s = options_.now() - answer_time_s_;
  if (answered_ && age_s <= options_.keep_s) {
    std::vector<Member> members;
    members.reserve(members_.size());
    for (const auto& [address, member] : members_) members.push_back(member);
    return members;
  }
  return WithReason(
      absl::StatusCode::kUnavailable,
      absl::StrFormat("the registry has answered %s: %s",
                      answered_ ? absl::StrFormat("not for %.0f s", age_s) : "never",
                      error_.ok() ? "it was not asked yet" : std::string(error_.message())),
      kRegistryAway);
}

void MemberList::Close() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    stopped_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace mla::client
