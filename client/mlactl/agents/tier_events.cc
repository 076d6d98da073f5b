#include "client/mlactl/agents/tier_events.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace mla::mlactl {
namespace {

constexpr int kFullReply = 256;  // events; a reply with fewer is the last for now

// Returns the name without prefix, in small letters; for values of a newer server, the word and the
// number.
std::string Plain(const std::string& name, absl::string_view prefix, absl::string_view word,
                  int number) {
  if (name.empty()) return absl::StrCat(word, " ", number);
  return absl::AsciiStrToLower(absl::StripPrefix(name, prefix));
}

std::string KindName(v1::CacheEventKind kind) {
  return Plain(v1::CacheEventKind_Name(kind), "CACHE_EVENT_KIND_", "kind", static_cast<int>(kind));
}

std::string TierName(v1::CacheTier tier) {
  return Plain(v1::CacheTier_Name(tier), "CACHE_TIER_", "tier", static_cast<int>(tier));
}

}  // namespace

absl::Status TierEvents::Read(client::Client* client) {
  return client->WatchEvents(last_, [this](const v1::WatchEventsReply& reply) {
    for (const v1::CacheEvent& event : reply.events()) {
      // Numbers are without gaps as long as the tenant has the model.
      if (begun_ && event.number() != last_ + 1) complete_ = false;
      last_ = event.number();
      if (event.model_id() != model_id_) continue;
      begun_ = true;
      const std::string tier = TierName(event.tier());
      rows_[tier][KindName(event.kind())] += event.rows();
      if (event.kind() == v1::CACHE_EVENT_KIND_RESTORED) {
        restored_.emplace_back(static_cast<int64_t>(event.unix_ms()), tier);
      }
    }
    return reply.events_size() >= kFullReply;
  });
}

}  // namespace mla::mlactl
